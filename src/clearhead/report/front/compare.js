// ---- Two heads beside each other: the differences of their weights.

import { ARROWS, make, penOf } from "../../base/front/dom.js";
import { grouped } from "../../base/front/numbers.js";
import { cssColour } from "../../base/front/ramp.js";
import { drawDifference } from "./apart.js";
import { Both, mapsOf, weightIn } from "./both.js";
import { differenceOf, frameOf, inText, mayBeside, objectionTo, placesOf } from "./difference.js";
import { Layout } from "./layout.js";
import { drawCross, drawLabels } from "./marks.js";
import { keyOf, placesIn } from "./measures.js";
import { headName } from "./names.js";
import { drawRamp, signedTables } from "./signed.js";
import { pairOf } from "./view.js";
import { pairName, percent, plural, signed } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Compared, Frame, FullPair, Heads, Names, PageOfHeads, Pair, Readers, Shown, Side } from "./types.d.ts"
 */

/**
 * A side of the comparison from the address: a head, `pins` for the average of the pinned heads, or `uniform`.
 *
 * @param {string | null} text
 * @param {Heads} run
 */
function sideIn(text, run) {
  if (text === "pins" || text === "uniform") return text;
  const [found, ...more] = placesIn(text, run);
  return found && !more.length ? keyOf(found) : null;
}

const ONLY = [215, 30]; // the steps of the colours of words that the first, or the second, text alone has

/** @satisfies {Readers} what this pane reads of the address */
export const ADDRESS_OF_COMPARISON = { a: sideIn, b: sideIn };

/**
 * @param {PageOfHeads} page
 * @param {string} side
 */
export function sideName(page, side) {
  const { run, view } = page;
  if (side === "uniform") return "uniform attention";
  if (side === "pins") return `average of the ${placesIn(view.pins, run).length} pinned`;
  return headName(page, placesIn(side, run)[0]);
}

export class ComparePane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.canvas = page.find("apart", HTMLCanvasElement);
    this.both = new Both(page, (pair) => this.take(pair));
    this.job = 0;
    this.wanted = ""; // the comparison that is shown, or is being computed
    /** @type {Compared | null} */
    this.found = null;
    page.find("swap").addEventListener("click", () => page.choose({ a: page.view.b, b: page.view.a }));
    page.find("stop-comparing").addEventListener("click", () => page.choose({ a: null, b: null }));
    /** @param {MouseEvent} event */
    const pairAt = (event) => (this.found ? this.pairAt(event.offsetX, event.offsetY) : null);
    this.canvas.addEventListener("pointermove", (event) => page.hover(this.across(pairAt(event))));
    this.canvas.addEventListener("pointerleave", () => page.hover(null));
    this.canvas.addEventListener("click", (event) => this.take(pairAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** The comparison that is shown. */
  get made() {
    if (!this.found) throw new Error("nothing is compared yet");
    return this.found;
  }

  /**
   * The promise of a side: its name, and the heads whose mean it is; uniform attention has no heads.
   *
   * @param {string} side
   * @returns {Promise<Side>}
   */
  async open(side) {
    const { page } = this;
    const places = side === "uniform" ? [] : placesIn(side === "pins" ? page.view.pins : side, page.run);
    const heads = await Promise.all(places.map(({ layer, head }) => page.run.open(layer, head)));
    return { name: sideName(page, side), heads, places };
  }

  /**
   * The words of the compared texts: where the two differ both, and which text alone has a word.
   *
   * @param {Frame} frame
   * @returns {Names}
   */
  wordsOf({ queries, keys, layers, rows, columns }) {
    const { texts } = this.page;
    /**
     * @param {"queryText" | "keyText"} text
     * @param {(Int32Array | null)[]} places
     * @param {number} count
     */
    const words = (text, places, count) => Array.from({ length: count }, (_, at) => {
      const [one, other] = layers.map((layer, side) => texts[layer[text]][inText(places[side], at)]);
      if (!one) return { ...other, at: places[1]?.[at], only: /** @type {const} */ (1) };
      const own = { ...one, at: places[0]?.[at] };
      if (!other) return { ...own, only: /** @type {const} */ (0) };
      return other.label === one.label ? own : { ...own, other: other.label };
    });
    return [words("queryText", rows, queries), words("keyText", columns, keys)];
  }

  /**
   * A pair of the compared texts as a pair of the chosen head's texts, or back (`way` 1); null where it has none.
   *
   * @param {Partial<Pair> | null} pair
   * @param {number} [way]
   * @returns {Pair | null}
   */
  across(pair, way = 0) {
    if (!pair) return null;
    const { rows, columns } = placesOf(this.made.frame, this.page.now.layer);
    /**
     * @param {number | null | undefined} place
     * @param {Int32Array | null} places
     */
    const at = (place, places) => (place === null || place === undefined ? null
      : way ? (places ? places.indexOf(place) : place) : inText(places, place));
    const found = { i: at(pair.i, rows), j: at(pair.j, columns) };
    return (found.i ?? 0) < 0 || (found.j ?? 0) < 0 ? null : found;
  }

  /** The divergence of each query, the mean, the pairs that differ most, and the place of the map on its canvas. */
  get numbers() {
    const { layout, frame: { rows, columns }, difference: { byQuery, mean, compared, largest } } = this.made;
    const { left, top, across: { cell } } = layout;
    const own = (/** @type {Int32Array | null} */ places, /** @type {number} */ at) => inText(places, at);
    return {
      byQuery: Array.from(byQuery).filter((_, i) => own(rows[0], i) >= 0), mean, compared, left, top, cell,
      largest: largest.map((pair) => ({ ...pair, i: own(rows[0], pair.i), j: own(columns[0], pair.j) })),
    };
  }

  /** @param {Shown} shown */
  async paint(shown) {
    const { page } = this;
    const { a, b, pins } = page.view;
    const section = page.find("compare");
    const started = section.hidden && page.host.dataset.shown !== undefined;
    section.hidden = a === null || b === null;
    if (a === null || b === null) {
      this.wanted = "";
      this.found = null;
      return;
    }
    if (started) section.scrollIntoView({ block: "nearest" });
    const wanted = [a, b, pins, page.view.all, page.host.clientWidth, page.host.hasAttribute("data-large")].join();
    if (this.wanted === wanted) {
      if (this.found) this.draw(shown);
      return;
    }
    this.wanted = wanted;
    this.found = null;
    const job = ++this.job;
    delete page.host.dataset.compare;
    const [one, other] = await Promise.all([this.open(a), this.open(b)]);
    if (job !== this.job) return;
    const heads = [...one.heads, ...other.heads];
    const frame = heads.length ? frameOf(page.run, heads) : null;
    if (frame) for (const side of [one, other]) side.heads = side.heads.map((own) => ({ ...own, ...placesOf(frame, own.layer) }));
    const [head] = [...one.heads, ...other.heads];
    page.find("compare-title").textContent = `${one.name} − ${other.name}`;
    const objection = objectionTo(one, other);
    page.find("compare-shown").hidden = objection !== null;
    page.find("compare-said").textContent = objection ?? "Comparing …";
    if (objection === null && frame) {
      const names = this.wordsOf(frame);
      const width = page.find("apart-box").clientWidth - 6;
      const large = page.host.hasAttribute("data-large");
      const whole = { ...head, queries: frame.queries, keys: frame.keys, pyramid: frame.rows[0] ? null : head.pyramid };
      const layout = new Layout(whole, names, width, Math.max(280, 0.8 * window.innerHeight), window.devicePixelRatio || 1, large);
      const wantedStill = () => job === this.job && this.wanted === wanted;
      const difference = await differenceOf(one, other, frame, layout.down.per, layout.across.per, wantedStill);
      const maps = difference && await mapsOf([one, other], frame, layout.down.per, layout.across.per, wantedStill);
      if (difference === null || maps === null) return;
      this.found = { sides: [one, other], head, frame, names, layout, difference, maps };
      this.say();
      this.draw(page.now);
    }
    page.host.dataset.compare = "drawn";
  }

  /** @param {Pair | null} pair */
  hover(pair) {
    if (this.found) this.draw(this.page.now, pair);
  }

  say() {
    const { mean, compared, leftOut, alone, step, largest } = this.made.difference;
    const { page } = this;
    const { frame: { queries }, names } = this.made;
    const [first, second] = alone;
    page.find("compare-said").textContent = compared === 0 ? "No query can be compared: their masks differ, or none sees a key."
      : `They are ${mean.toPrecision(3)} nats apart: the Jensen–Shannon divergence of their weights, a mean over ` +
        `${plural(compared, "query")}. 0 is the same weights, ${Math.LN2.toFixed(3)} nothing in common.` +
        (step > 1 ? ` Every ${step === 2 ? "second" : `${step}th`} query of ${grouped(queries)} is compared.` : "") +
        (first || second ? ` Not compared: ${plural(first, "query")} that only the first text has, and ${grouped(second)} that only the second has.` : "") +
        (leftOut ? ` ${plural(leftOut, "query")} left out: the masks differ, or leave no key.` : "");
    this.canvas.setAttribute("aria-label", `differences of ${this.made.sides[0].name} and ${this.made.sides[1].name}: arrow keys move over the pairs`);
    const [a, b] = this.made.sides;
    page.find("apart-only").hidden = !names.some((words) => words.some(({ only }) => only !== undefined));
    page.find("apart-only").textContent = `Words in blue are in the text of ${a.name} alone, words in brown in that of ${b.name} ` +
      "alone; the rows and columns of such words are hatched, as those of masked pairs are.";
    page.find("apart-less").textContent = `${b.name} more`;
    page.find("apart-more").textContent = `${a.name} more`;
    page.find("apart-list").replaceChildren(...largest.map(({ i, j, a: p, b: q }) => {
      const button = make("button", "other");
      button.append(make("span", "name", pairName(this.made.names, i, j)),
        make("span", "", `${percent(p)} and ${percent(q)}`),
        make("span", "share", `${signed(100 * (p - q), 1)}`.replace(/^(?=\d)/, "+")));
      button.addEventListener("click", () => this.take({ i, j }));
      const item = make("li");
      item.append(button);
      return item;
    }));
  }

  /**
   * The pair with the largest difference in the cell at a point.
   *
   * @param {number} x
   * @param {number} y
   * @returns {FullPair | null}
   */
  pairAt(x, y) {
    const { down, across } = this.made.layout;
    const { i: row, j: column } = this.made.layout.pointAt(x, y);
    if (row === null || column === null) return null;
    let best = { i: row, j: column, size: -1 };
    for (let i = row; i < Math.min(this.made.frame.queries, row + down.per); i++) {
      for (let j = column; j < Math.min(this.made.frame.keys, column + across.per); j++) {
        const [p, q] = this.weightsAt(i, j);
        if (Math.abs(p - q) > best.size) best = { i, j, size: Math.abs(p - q) };
      }
    }
    return { i: best.i, j: best.j };
  }

  /**
   * The weights of a pair on both sides; NaN where a text does not have the pair.
   *
   * @param {number} i
   * @param {number} j
   * @returns {[number, number]}
   */
  weightsAt(i, j) {
    const { sides: [a, b], head } = this.made;
    return [weightIn(a, head, i, j), weightIn(b, head, i, j)];
  }

  /**
   * Chooses a pair. Where the chosen head is of another text, or of one that lacks the pair, the first compared head that has
   * the pair is chosen too.
   *
   * @param {FullPair | null} pair
   */
  take(pair) {
    if (pair === null) return;
    const { view, run, now: shown } = this.page;
    const { sides } = this.made;
    const same = sides.flatMap((side) => side.places).some(({ layer }) => run.layers[layer].queryText === shown.layer.queryText &&
      run.layers[layer].keyText === shown.layer.keyText);
    const own = same ? this.across(pair) : null;
    if (own && own.i !== null && own.j !== null) return void this.page.choose(pairOf(view.view, own.i, own.j));
    for (const { heads, places } of sides) {
      for (const [number, { rows, columns }] of heads.entries()) {
        const [i, j] = [inText(rows, pair.i), inText(columns, pair.j)];
        if (i >= 0 && j >= 0) return void this.page.choose({ ...places[number], ...pairOf(view.view, i, j) });
      }
    }
  }

  /** @param {KeyboardEvent} event */
  move(event) {
    const step = ARROWS[event.key];
    if (!step || !this.found) return;
    event.preventDefault();
    const { i, j } = this.across(this.page.now, 1) ?? { i: null, j: null };
    /**
     * @param {number} value
     * @param {number} count
     */
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
    this.take({
      i: clamp((i ?? 0) + step[0] * this.made.layout.down.per, this.made.frame.queries),
      j: clamp((j ?? 0) + step[1] * this.made.layout.across.per, this.made.frame.keys),
    });
  }

  /**
   * Draws the differences, with the words and the frame of the current pair.
   *
   * @param {Pair} given
   * @param {Pair | null} [hovered]
   */
  draw({ i, j }, hovered = this.page.hovered) {
    const { difference, layout, names, frame: { queries, keys } } = this.made;
    const { theme } = this.page;
    const at = this.across(hovered ?? { i, j }, 1) ?? { i: null, j: null };
    const whole = at.i !== null && at.j !== null && at.i < queries && at.j < keys;
    const pair = whole ? { i: at.i ?? 0, j: at.j ?? 0 } : null;
    drawDifference(this.canvas, difference, layout, theme);
    const pen = penOf(this.canvas);
    const table = signedTables[theme.dark ? "dark" : "light"];
    drawLabels(pen, { names }, layout, theme.colours, ONLY.map((step) => cssColour(table, step)));
    if (pair) drawCross(pen, { names }, pair, layout, theme.colours);
    this.tell(pair);
    this.both.draw(this.made, pair);
    drawRamp(this.page.find("apart-ramp", HTMLCanvasElement), table);
    /** @param {number} share */
    const points = (share) => `${share > 0 ? "+" : ""}${signed(100 * share * difference.limit, difference.limit < 0.1 ? 2 : 0)}`;
    this.page.find("apart-ticks").replaceChildren(...[-1, -0.25, 0, 0.25, 1].map((share) => make("span", "", points(share))));
  }

  /**
   * The current pair in words.
   *
   * @param {FullPair | null} pair
   */
  tell(pair) {
    const say = this.page.find("apart-pair");
    if (pair === null) {
      say.textContent = "";
      return;
    }
    const [p, q] = this.weightsAt(pair.i, pair.j);
    const masked = this.made.sides.flatMap(({ heads }) => heads).every((head) => !mayBeside(head, pair.i, pair.j));
    const apart = this.made.difference.byQuery[pair.i];
    const name = pairName(this.made.names, pair.i, pair.j);
    say.textContent = `${name}: ${p !== p || q !== q ? `${percent(p !== p ? q : p)}; only one text has this pair` : masked ? "masked" : `${percent(p)} and ${percent(q)}`}` +
      (apart === apart ? `; the query's weights are ${apart.toFixed(3)} nats apart` : "");
  }
}
