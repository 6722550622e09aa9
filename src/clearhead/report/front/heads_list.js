// ---- Heads in the order of a measure, and two measures of all heads as points.

import { everyIn, make } from "../../base/front/dom.js";
import { signedBarOf } from "./bar.js";
import { figureWords, keyOf, limitOf, rankedBy, RATIOS, titleOf, valueWords } from "./measures.js";
import { plural } from "./words.js";

/**
 * @import { HeadsPane } from "./heads.js"
 * @import { HeadPlace } from "./types.d.ts"
 */

const ROWS_AT_ONCE = 200;

export class HeadList {
  /** @param {HeadsPane} pane */
  constructor(pane) {
    this.pane = pane;
    this.box = pane.page.find("head-list");
    this.most = ROWS_AT_ONCE;
    this.box.addEventListener("keydown", (event) => walk(event, this.pane.page.root, everyIn(this.box, "button", HTMLElement)));
  }

  paint() {
    const { pane } = this;
    const { view } = pane.page;
    const entries = pane.places.filter((place) => pane.shown.has(place))
      .map((place) => ({ place, figure: pane.figure(place) }));
    const ranked = rankedBy(pane.measure, entries);
    const limit = limitOf(pane.measure, entries.map(({ figure }) => figure));
    const focused = pane.places.find(({ row }) => row && row === pane.page.root.activeElement);
    const rows = ranked.slice(0, this.most).map(({ place, figure }) => {
      const row = make("button", "ranked");
      place.row = row;
      row.title = pane.words(place); // the name is what is seen: the head and its value
      row.append(make("span", "name", place.name), signedBarOf((figure?.departs ?? 0) / limit),
        make("span", "share", figure === null ? "–" : valueWords(pane.measure, figure.value)));
      row.setAttribute("aria-current", String(place.layer === view.layer && place.head === view.head));
      row.addEventListener("click", () => pane.open(place));
      return row;
    });
    this.box.replaceChildren(...rows);
    if (focused?.row?.isConnected) focused.row.focus();
    const rest = ranked.length - rows.length;
    if (rest <= 0) return;
    const more = make("button", "chip", `${Math.min(rest, ROWS_AT_ONCE)} more of ${rest}`);
    more.addEventListener("click", () => {
      this.most += ROWS_AT_ONCE;
      this.paint();
    });
    this.box.append(more);
  }
}

/** @type {Record<string, number>} */
const WAYS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

/**
 * Arrow keys choose the head before or after.
 *
 * @param {KeyboardEvent} event
 * @param {ShadowRoot} root
 * @param {HTMLElement[]} elements
 */
function walk(event, root, elements) {
  const from = elements.findIndex((element) => element === root.activeElement);
  const way = WAYS[event.key];
  if (from < 0 || way === undefined) return;
  event.preventDefault();
  elements[Math.min(elements.length - 1, Math.max(0, from + way))].focus();
}

export class HeadScatter {
  /** @param {HeadsPane} pane */
  constructor(pane) {
    this.pane = pane;
    this.box = pane.page.find("points");
    this.name = pane.page.find("point-name");
    /** @type {Map<HTMLElement, HeadPlace>} */
    this.dots = new Map();
    this.box.addEventListener("keydown", (event) => walk(event, pane.page.root, [...this.dots.keys()]));
    for (const kind of ["pointerover", "focusin"]) {
      this.box.addEventListener(kind, ({ target }) => {
        const place = target instanceof HTMLElement ? this.dots.get(target) : undefined;
        if (place) this.name.textContent = this.words(place);
      });
    }
  }

  /** The other measure: the second that there is, until one is chosen. */
  get against() {
    const { page: { view, run }, measure } = this.pane;
    const other = run.measures.find(({ name }) => name === "normalised entropy" && name !== measure)
      ?? run.measures.find(({ name }) => name !== measure);
    return view.against ?? other?.name ?? measure;
  }

  /** @param {HeadPlace} place */
  words(place) {
    const { pane } = this;
    return `${place.name}: ${figureWords(pane.measure, pane.figure(place))}; ` +
      figureWords(this.against, pane.figure(place, this.against));
  }

  paint() {
    const { pane } = this;
    const { page } = pane;
    const names = [pane.measure, this.against];
    page.find("against", HTMLSelectElement).value = this.against;
    const known = pane.places.flatMap((place) => {
      const at = names.flatMap((name) => pane.figure(place, name) ?? []);
      return at.length === names.length ? [{ place, at }] : [];
    });
    const tops = names.map((name, axis) => topOf(name, known.map(({ at }) => at[axis].value)));
    known.sort((a, b) => a.at[0].value - b.at[0].value);
    const { activeElement } = page.root;
    const focused = activeElement instanceof HTMLElement ? this.dots.get(activeElement) : undefined;
    this.dots = new Map(known.map(({ place, at }) => {
      const dot = make("button", "dot");
      dot.style.left = `${(100 * at[0].value) / tops[0]}%`;
      dot.style.bottom = `${(100 * at[1].value) / tops[1]}%`;
      dot.setAttribute("aria-label", this.words(place));
      const chosen = place.layer === page.view.layer && place.head === page.view.head;
      dot.setAttribute("aria-current", String(chosen));
      dot.tabIndex = chosen ? 0 : -1;
      dot.classList.toggle("dim", !pane.shown.has(place));
      dot.classList.toggle("pinned", pane.pinned.has(keyOf(place)));
      dot.addEventListener("click", () => pane.open(place));
      return [dot, place];
    }));
    const dots = [...this.dots.keys()];
    if (dots.length && !dots.some(({ tabIndex }) => tabIndex === 0)) dots[0].tabIndex = 0;
    this.box.replaceChildren(...dots);
    dots.find((dot) => this.dots.get(dot) === focused)?.focus();
    for (const [axis, id] of ["x-axis", "y-axis"].entries()) {
      page.find(id).replaceChildren(...[0, tops[axis] / 2, tops[axis]].map((value, tick) => (
        make("span", "", tick === 1 && axis === 0 ? titleOf(names[axis]) : valueWords(names[axis], value)))));
    }
    const unknown = pane.places.length - known.length;
    this.name.textContent = "Each point is a head: point at one, or use the arrow keys." +
      (unknown ? ` Without a point, since a measure is not known: ${plural(unknown, "head")}.` : "");
  }
}

/**
 * The end of an axis that holds all these values.
 *
 * @param {string} name
 * @param {number[]} values
 */
function topOf(name, values) {
  const most = Math.max(...values, 1e-9);
  if (!RATIOS.has(name)) return [0.05, 0.1, 0.2, 0.5, 1].find((top) => top >= most) ?? most;
  const step = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((times) => times * step).find((top) => top >= most) ?? most;
}
