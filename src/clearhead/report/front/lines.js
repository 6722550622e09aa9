// ---- Two columns, queries left and keys right, with lines from each query to its strongest keys.

import { draw, penOf } from "../../base/front/dom.js";
import { keepStrongest } from "./arcs.js";
import { weightOf } from "./weights.js";
import { nameOf, percent, plural, shortened } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { FullPair, Head, Pair, Readers, Shown, WeightedPair, Word } from "./types.d.ts"
 */

const ROW = 15; // CSS pixels of a token
const WHOLE_COLUMN = 100; // up to so many tokens are shown at full height; with more, a box scrolls
const ABOVE = 20; // CSS pixels over the columns, for their titles

/** @satisfies {Readers} what this pane reads of the address: how many lines a query has where they are open; null: closed */
export const ADDRESS_OF_LINES = { lines: (text) => (/^[1-5]$/.test(text ?? "") ? text : null) };

/**
 * The strongest keys of query i, strongest first, as [key, weight]: at most ARCS, with weights above 0.
 *
 * @param {Head} head
 * @param {number} i
 * @returns {[number, number][]}
 */
function strongestOf(head, i) {
  head.strongest ??= new Map();
  const known = head.strongest.get(i);
  if (known) return known;
  /** @type {WeightedPair[]} */
  const strongest = [];
  for (let j = head.start[i]; j < head.stop[i]; j++) keepStrongest(strongest, weightOf(head, i, j), i, j);
  const found = strongest.map(([weight, , j]) => /** @type {[number, number]} */ ([j, weight]));
  head.strongest.set(i, found);
  return found;
}

/**
 * The rows in sight of a column of `count` tokens, [first, past the last], in a box scrolled by `top`.
 *
 * @param {number} count
 * @param {number} top
 * @param {number} height
 * @returns {[number, number]}
 */
const rowsIn = (count, top, height) =>
  [Math.max(0, Math.floor(top / ROW) - 1), Math.min(count, Math.ceil((top + height) / ROW) + 1)];

const measuring = penOf(document.createElement("canvas"));

/**
 * A label cut so that it is at most `room` pixels wide in bold.
 *
 * @param {string} label
 * @param {number} room
 */
function fitted(label, room) {
  measuring.font = "700 12px system-ui, sans-serif";
  let text = shortened(label, 24);
  while (text.length > 2 && measuring.measureText(text).width > room) text = shortened(text, Array.from(text).length - 1);
  return text;
}

export class LinesPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.box = page.find("lines-box");
    this.svg = page.find("lines-picture", SVGSVGElement);
    this.details = page.find("lines", HTMLDetailsElement);
    this.count = page.find("lines-strongest", HTMLSelectElement);
    /** @type {Pair | null} the pair whose lines alone are shown while a pointer is there */
    this.alone = null;
    this.asked = 0; // the next frame of drawing
    this.room = 0; // CSS pixels for the words of a side
    this.revealed = ""; // the token that was last brought into sight
    this.last = "3";
    this.details.addEventListener("toggle", () => {
      const open = page.view.lines !== null;
      if (this.details.open !== open) page.choose({ lines: open ? null : this.last });
    });
    this.count.addEventListener("change", () => page.choose({ lines: this.count.value }));
    this.box.addEventListener("scroll", () => this.later());
    this.listen();
  }

  later() {
    cancelAnimationFrame(this.asked);
    this.asked = requestAnimationFrame(() => this.draw());
  }

  /** @param {Shown} shown */
  paint(shown) {
    const { lines, view, own: token } = this.page.view;
    this.details.open = lines !== null;
    if (lines === null) return;
    this.last = lines;
    this.count.value = lines;
    const { head, names } = shown;
    this.alone = null;
    const longest = Math.max(...names.map((words) => words.reduce((most, { label }) => Math.max(most, label.length), 0)));
    this.room = 58 + 7.2 * Math.min(24, longest);
    const rows = Math.max(head.queries, head.keys);
    const scrolls = rows > WHOLE_COLUMN;
    this.box.classList.toggle("scrolls", scrolls);
    this.page.find("lines-sheet").style.height = `${rows * ROW + ABOVE + 6}px`;
    const from = view === "out" ? "query" : "key";
    this.box.setAttribute("aria-label", `${plural(head.queries, "query")} left, ${plural(head.keys, "key")} right: up and ` +
      `down choose the next ${from}, right chooses keys, left queries`);
    const [reach, words] = view === "out" ? ["of", names[0]] : ["that reach", names[1]];
    this.page.find("lines-note").textContent =
      `Each query, left, has lines to the ${lines === "1" ? "key" : `${lines} keys`} of its largest weights, right; a thicker ` +
      `line is a larger weight. The lines ${reach} “${nameOf(words, token)}” are highlighted. Point at a token to see its lines alone; click to choose it.`;
    const wanted = `${this.page.view.layer} ${view} ${token}`;
    if (scrolls && wanted !== this.revealed) {
      const y = token * ROW;
      const { scrollTop, clientHeight } = this.box;
      if (y < scrollTop || y > scrollTop + clientHeight - ABOVE - ROW) this.box.scrollTop = y - clientHeight / 2;
    }
    this.revealed = wanted;
    this.draw();
  }

  /** Draws the lines; of a long text only the rows in sight. */
  draw() {
    const { page, svg, box } = this;
    const { lines, view } = page.view;
    if (lines === null || !page.shown?.look) return;
    const token = page.view.own;
    const { head, names } = page.now;
    const width = page.find("lines-sheet").clientWidth;
    const height = box.classList.contains("scrolls") ? box.clientHeight : page.find("lines-sheet").clientHeight;
    const top = box.classList.contains("scrolls") ? box.scrollTop : 0;
    svg.setAttribute("width", String(width));
    svg.setAttribute("height", String(height));
    const column = Math.min(this.room, Math.round(width * 0.3)); // the room of each side for its words
    /** @param {number} index */
    const yOf = (index) => ABOVE + (index + 0.5) * ROW - top;
    const queries = rowsIn(head.queries, top, height);
    const keys = rowsIn(head.keys, top, height);
    const { alone } = this;
    const one = alone ?? (view === "out" ? { i: token, j: null } : { i: null, j: token });
    /**
     * @param {number} i
     * @param {number} j
     */
    const isOf = (i, j) => (one.i === null ? j === one.j : i === one.i);
    /** @type {(FullPair & { weight: number, own: boolean })[]} */
    const drawn = [];
    /** @type {Map<number, number>} */
    const share = new Map(); // the weights of the one token, written beside the other ends
    /** @param {number} i */
    const add = (i) => {
      for (const [j, weight] of strongestOf(head, i).slice(0, Number(lines))) {
        const own = isOf(i, j);
        if (own) share.set(one.i === null ? i : j, weight);
        if (own || alone === null) drawn.push({ i, j, weight, own });
      }
    };
    for (let i = queries[0]; i < queries[1]; i++) add(i);
    if (one.i !== null && (one.i < queries[0] || one.i >= queries[1])) add(one.i);
    drawn.sort((a, b) => Number(a.own) - Number(b.own) || a.weight - b.weight);
    /** @type {SVGElement[]} */
    const parts = drawn.map(({ i, j, weight, own }) => draw("path", {
      class: own ? "own" : "",
      "data-pair": `${i}/${j}`,
      d: this.path(column + 6, yOf(i), width - column - 6, yOf(j)),
      "stroke-width": ((own ? 1.5 : 0.5) + 4.5 * weight).toFixed(2),
      "stroke-opacity": own ? 1 : (0.25 + 0.75 * Math.sqrt(weight)).toFixed(2),
    }));
    /**
     * @param {Word[]} words
     * @param {[number, number]} given
     * @param {"i" | "j"} name
     */
    const side = (words, [first, past], name) => {
      for (let index = first; index < past; index++) {
        const chosen = index === (name === "i" ? one.i : one.j);
        const other = (name === "i") === (one.i === null) && share.has(index);
        const label = fitted(words[index].label, column - 50);
        const weight = other ? percent(share.get(index) ?? 0) : "";
        const x = name === "i" ? column : width - column;
        const text = draw("text", { x, y: yOf(index) + 4, class: `${name}${chosen ? " chosen" : other ? " end" : ""}` });
        const space = weight && " ";
        if (name === "i") text.append(draw("tspan", { class: "weight" }, weight + space), this.isolated(label));
        else text.append(this.isolated(label), draw("tspan", { class: "weight" }, space + weight));
        const row = draw("g", { class: `row ${name}`, "data-side": name, "data-index": index });
        const left = name === "i" ? 0 : width - column;
        row.append(draw("rect", { x: left, y: yOf(index) - ROW / 2, width: column, height: ROW }), text);
        parts.push(row);
      }
    };
    side(names[0], queries, "i");
    side(names[1], keys, "j");
    parts.push(draw("rect", { class: "over", width, height: ABOVE - 4 }),
      draw("text", { x: column, y: 11, class: "i title" }, "queries look"),
      draw("text", { x: width - column, y: 11, class: "j title" }, "at keys"));
    svg.replaceChildren(...parts);
  }

  /** @param {string} label */
  isolated(label) {
    return draw("tspan", {}, `\u2068${label}\u2069`);
  }

  /**
   * @param {number} x1
   * @param {number} y1
   * @param {number} x2
   * @param {number} y2
   */
  path(x1, y1, x2, y2) {
    const middle = (x1 + x2) / 2;
    return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  }

  /** @param {Pair | null} pair */
  hover(pair) {
    const { view } = this.page;
    if (view.lines === null) return;
    const other = pair && (view.view === "out" ? pair.i === view.token : pair.j === view.token); // a pair of the chosen token
    this.alone = !pair || (other && pair.i !== null && pair.j !== null) ? null : pair;
    this.later();
  }

  listen() {
    const { page, svg, box } = this;
    /**
     * @param {Event} event
     * @returns {Partial<FullPair> | null}
     */
    const at = (event) => {
      const row = event.target instanceof Element ? event.target.closest("g.row") : null;
      if (!(row instanceof SVGGElement)) return null;
      const index = Number(row.dataset.index);
      return row.dataset.side === "i" ? { i: index } : { j: index };
    };
    svg.addEventListener("pointermove", (event) => {
      const found = at(event);
      page.hover(found && { i: found.i ?? null, j: found.j ?? null });
    });
    svg.addEventListener("pointerleave", () => page.hover(null));
    // the picture may be drawn anew while a button is down, so that no click comes
    /** @type {Partial<FullPair> | null} */
    let down = null;
    svg.addEventListener("pointerdown", (event) => { down = event.button === 0 ? at(event) : null; });
    svg.addEventListener("pointerup", (event) => {
      const found = at(event);
      if (!found || !down || found.i !== down.i || found.j !== down.j) return;
      const view = found.i === undefined ? "in" : "out";
      page.choose({ view, token: found.i ?? found.j, pair: null });
    });
    box.addEventListener("keydown", (event) => {
      const { view, own: token } = page.view;
      const turned = event.key === "ArrowLeft" ? "out" : event.key === "ArrowRight" ? "in" : undefined;
      const last = page.view.lengths[0] - 1;
      /** @type {Record<string, number>} */
      const places = { ArrowUp: token - 1, ArrowDown: token + 1, Home: 0, End: last,
        PageUp: token - 20, PageDown: token + 20 };
      const to = Object.hasOwn(places, event.key) ? places[event.key] : undefined;
      if (turned === undefined && to === undefined) return;
      event.preventDefault();
      if (to !== undefined) page.choose({ token: Math.min(last, Math.max(0, to)), pair: null }, false);
      else if (turned !== undefined && turned !== view) {
        const { queries, keys } = page.now.head;
        page.choose({ view: turned, token: Math.min(token, (turned === "out" ? queries : keys) - 1), pair: null }, false);
      }
    });
  }
}
