// ---- Heads in the order of a measure, and two measures of all heads as points.

import { figureWords, keyOf, limitOf, rankedBy, RATIOS, titleOf, valueWords } from "./measures.js";
import { barOf, make, plural } from "./words.js";

const ROWS_AT_ONCE = 200;

export class HeadList {
  constructor(pane) {
    this.pane = pane;
    this.box = pane.page.find("head-list");
    this.most = ROWS_AT_ONCE;
    this.box.addEventListener("keydown", (event) => walk(event, this.pane.page.root, [...this.box.querySelectorAll("button")]));
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
      row.setAttribute("aria-label", pane.words(place));
      const departs = figure?.departs ?? 0;
      row.append(make("span", "name", place.name), barOf(Math.min(50, (50 * Math.abs(departs)) / limit), departs < 0 ? "less" : ""),
        make("span", "share", figure === null ? "–" : valueWords(pane.measure, figure.value)));
      row.setAttribute("aria-current", String(place.layer === view.layer && place.head === view.head));
      row.addEventListener("click", () => pane.open(place));
      return row;
    });
    this.box.replaceChildren(...rows);
    if (focused?.row.isConnected) focused.row.focus();
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

/** Arrow keys to the one before and after. */
function walk(event, root, elements) {
  const from = elements.indexOf(root.activeElement);
  const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  if (from < 0 || way === undefined) return;
  event.preventDefault();
  elements[Math.min(elements.length - 1, Math.max(0, from + way))].focus();
}

export class HeadScatter {
  constructor(pane) {
    this.pane = pane;
    this.box = pane.page.find("points");
    this.name = pane.page.find("point-name");
    this.box.addEventListener("keydown", (event) => walk(event, pane.page.root, this.dots ?? []));
    for (const kind of ["pointerover", "focusin"]) {
      this.box.addEventListener(kind, (event) => {
        if (event.target.place) this.name.textContent = this.words(event.target.place);
      });
    }
  }

  /** The other measure: the second that there is, until one is chosen. */
  get against() {
    const { page: { view, run }, measure } = this.pane;
    const other = run.measures.find(({ name }) => name === "entropy" && name !== measure)
      ?? run.measures.find(({ name }) => name !== measure);
    return view.against ?? other?.name ?? measure;
  }

  words(place) {
    const { pane } = this;
    return `${place.name}: ${figureWords(pane.measure, pane.figure(place))}; ` +
      figureWords(this.against, pane.figure(place, this.against));
  }

  paint() {
    const { pane } = this;
    const { page } = pane;
    const names = [pane.measure, this.against];
    page.find("against").value = this.against;
    const known = pane.places.map((place) => ({ place, at: names.map((name) => pane.figure(place, name)) }))
      .filter(({ at }) => at.every((figure) => figure !== null));
    const tops = names.map((name, axis) => topOf(name, known.map(({ at }) => at[axis].value)));
    known.sort((a, b) => a.at[0].value - b.at[0].value);
    const focused = page.root.activeElement?.place;
    this.dots = known.map(({ place, at }) => {
      const dot = make("button", "dot");
      dot.place = place;
      dot.style.left = `${(100 * at[0].value) / tops[0]}%`;
      dot.style.bottom = `${(100 * at[1].value) / tops[1]}%`;
      dot.setAttribute("aria-label", this.words(place));
      const chosen = place.layer === page.view.layer && place.head === page.view.head;
      dot.setAttribute("aria-current", String(chosen));
      dot.tabIndex = chosen ? 0 : -1;
      dot.classList.toggle("dim", !pane.shown.has(place));
      dot.classList.toggle("pinned", pane.pinned.has(keyOf(place)));
      dot.addEventListener("click", () => pane.open(place));
      return dot;
    });
    if (this.dots.length && !this.dots.some(({ tabIndex }) => tabIndex === 0)) this.dots[0].tabIndex = 0;
    this.box.replaceChildren(...this.dots);
    this.dots.find(({ place }) => place === focused)?.focus();
    for (const [axis, id] of ["x-axis", "y-axis"].entries()) {
      page.find(id).replaceChildren(...[0, tops[axis] / 2, tops[axis]].map((value, tick) => (
        make("span", "", tick === 1 && axis === 0 ? titleOf(names[axis]) : valueWords(names[axis], value)))));
    }
    const unknown = pane.places.length - known.length;
    this.name.textContent = "Each point is a head: point at one, or use the arrow keys." +
      (unknown ? ` Not known of ${plural(unknown, "head")}.` : "");
  }
}

/** The end of an axis that holds all these values. */
function topOf(name, values) {
  const most = Math.max(...values, 1e-9);
  if (!RATIOS.has(name)) return [0.05, 0.1, 0.2, 0.5, 1].find((top) => top >= most) ?? most;
  const step = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((times) => times * step).find((top) => top >= most);
}
