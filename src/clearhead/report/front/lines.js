// ---- Two columns, queries left and keys right, with lines from each query to its strongest keys.

import { keepStrongest } from "./arcs.js";
import { weightOf } from "./weights.js";
import { draw, nameOf, percent, plural, shortened } from "./words.js";

const ROW = 15; // CSS pixels of a token
const WHOLE_COLUMN = 100; // so many tokens are shown at full height; of more, a box scrolls
const ABOVE = 20; // CSS pixels over the columns, for their titles

/** What this pane reads of the address: how many lines a query has where they are open; null: they are closed. */
export const ADDRESS_OF_LINES = { lines: (text) => (/^[1-5]$/.test(text ?? "") ? text : null) };

/** The strongest keys of query i, strongest first, as [key, weight]: ARCS or what there is above 0. */
function strongestOf(head, i) {
  head.strongest ??= new Map();
  if (!head.strongest.has(i)) {
    const found = [];
    for (let j = head.start[i]; j < head.stop[i]; j++) keepStrongest(found, weightOf(head, i, j), i, j);
    head.strongest.set(i, found.map(([weight, , j]) => [j, weight]));
  }
  return head.strongest.get(i);
}

/** Which rows of a column of `count` tokens are in sight, [first, past the last], of a box scrolled by `top`. */
const rowsIn = (count, top, height) =>
  [Math.max(0, Math.floor(top / ROW) - 1), Math.min(count, Math.ceil((top + height) / ROW) + 1)];

const measuring = document.createElement("canvas").getContext("2d");

/** A label cut so that it is at most `room` pixels wide in bold. */
function fitted(label, room) {
  measuring.font = "700 12px system-ui, sans-serif";
  let text = shortened(label, 24);
  while (text.length > 2 && measuring.measureText(text).width > room) text = shortened(text, Array.from(text).length - 1);
  return text;
}

export class LinesPane {
  constructor(page) {
    this.page = page;
    this.box = page.find("lines-box");
    this.svg = page.find("lines-picture");
    this.details = page.find("lines");
    this.count = page.find("lines-strongest");
    this.alone = null; // the pair whose lines alone are shown while a pointer is there
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

  paint(shown) {
    const { lines, view, token } = this.page.view;
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
      `Each query, left, has lines to the ${lines === "1" ? "key" : `${lines} keys`} of its largest weights, right; the heavier ` +
      `the thicker. Those ${reach} “${nameOf(words, token)}” stand out. Point at a token to see its lines alone; click to choose it.`;
    const wanted = `${this.page.view.layer} ${view} ${token}`;
    if (scrolls && wanted !== this.revealed) {
      const y = token * ROW;
      const { scrollTop, clientHeight } = this.box;
      if (y < scrollTop || y > scrollTop + clientHeight - ABOVE - ROW) this.box.scrollTop = y - clientHeight / 2;
    }
    this.revealed = wanted;
    this.draw();
  }

  /** Of a part of a long text, what is in sight. */
  draw() {
    const { page, svg, box } = this;
    const { lines, view, token } = page.view;
    if (lines === null || !page.shown) return;
    const { head, names } = page.shown;
    const width = page.find("lines-sheet").clientWidth;
    const height = box.classList.contains("scrolls") ? box.clientHeight : page.find("lines-sheet").clientHeight;
    const top = box.classList.contains("scrolls") ? box.scrollTop : 0;
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    const column = Math.min(this.room, Math.round(width * 0.3)); // of each side, for its words
    const yOf = (index) => ABOVE + (index + 0.5) * ROW - top;
    const queries = rowsIn(head.queries, top, height);
    const keys = rowsIn(head.keys, top, height);
    const { alone } = this;
    const one = alone ?? (view === "out" ? { i: token, j: null } : { i: null, j: token });
    const isOf = (i, j) => (one.i === null ? j === one.j : i === one.i);
    const drawn = [];
    const share = new Map(); // the weights of the one token, written beside the other ends
    const add = (i) => {
      for (const [j, weight] of strongestOf(head, i).slice(0, Number(lines))) {
        const own = isOf(i, j);
        if (own) share.set(one.i === null ? i : j, weight);
        if (own || alone === null) drawn.push({ i, j, weight, own });
      }
    };
    for (let i = queries[0]; i < queries[1]; i++) add(i);
    if (one.i !== null && (one.i < queries[0] || one.i >= queries[1])) add(one.i);
    drawn.sort((a, b) => a.own - b.own || a.weight - b.weight);
    const parts = drawn.map(({ i, j, weight, own }) => draw("path", {
      class: own ? "own" : "",
      "data-pair": `${i}/${j}`,
      d: this.path(column + 6, yOf(i), width - column - 6, yOf(j)),
      "stroke-width": ((own ? 1.5 : 0.5) + 4.5 * weight).toFixed(2),
      "stroke-opacity": own ? 1 : (0.25 + 0.75 * Math.sqrt(weight)).toFixed(2),
    }));
    const side = (words, [first, past], name) => {
      for (let index = first; index < past; index++) {
        const chosen = index === (name === "i" ? one.i : one.j);
        const other = (name === "i") === (one.i === null) && share.has(index);
        const label = fitted(words[index].label, column - 50);
        const weight = other ? percent(share.get(index)) : "";
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

  isolated(label) {
    return draw("tspan", {}, `\u2068${label}\u2069`);
  }

  path(x1, y1, x2, y2) {
    const middle = (x1 + x2) / 2;
    return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  }

  hover(pair) {
    const { view } = this.page;
    if (view.lines === null) return;
    const other = pair && (view.view === "out" ? pair.i === view.token : pair.j === view.token); // a pair of the chosen one
    this.alone = !pair || (other && pair.i !== null && pair.j !== null) ? null : pair;
    this.later();
  }

  listen() {
    const { page, svg, box } = this;
    const at = (event) => {
      const row = event.target.closest?.("g.row");
      return row ? { [row.dataset.side]: Number(row.dataset.index) } : null;
    };
    svg.addEventListener("pointermove", (event) => {
      const found = at(event);
      page.hover(found && { i: found.i ?? null, j: found.j ?? null });
    });
    svg.addEventListener("pointerleave", () => page.hover(null));
    // the picture may be drawn anew while a button is down, so that no click comes
    let down = null;
    svg.addEventListener("pointerdown", (event) => { down = event.button === 0 ? at(event) : null; });
    svg.addEventListener("pointerup", (event) => {
      const found = at(event);
      if (!found || !down || found.i !== down.i || found.j !== down.j) return;
      const view = found.i === undefined ? "in" : "out";
      page.choose({ view, token: found.i ?? found.j, pair: null });
    });
    box.addEventListener("keydown", (event) => {
      const { view, token } = page.view;
      const turned = { ArrowLeft: "out", ArrowRight: "in" }[event.key];
      const last = page.view.lengths[0] - 1;
      const to = { ArrowUp: token - 1, ArrowDown: token + 1, Home: 0, End: last,
        PageUp: token - 20, PageDown: token + 20 }[event.key];
      if (turned === undefined && to === undefined) return;
      event.preventDefault();
      if (to !== undefined) page.choose({ token: Math.min(last, Math.max(0, to)), pair: null }, false);
      else if (turned !== view) {
        const { queries, keys } = page.shown.head;
        page.choose({ view: turned, token: Math.min(token, (turned === "out" ? queries : keys) - 1), pair: null }, false);
      }
    });
  }
}
