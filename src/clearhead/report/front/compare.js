// ---- Two heads beside each other: what one attends to more than the other.

import { grouped } from "../../base/front/numbers.js";
import { drawDifference } from "./apart.js";
import {
  differenceOf, haveKey, haveQuery, headBeside, inText, objectionTo, placesAcross, weightBeside,
} from "./difference.js";
import { Layout } from "./layout.js";
import { drawCross, drawLabels } from "./marks.js";
import { keyOf, placesIn } from "./measures.js";
import { headName } from "./names.js";
import { drawRamp, signedTables } from "./signed.js";
import { pairOf } from "./view.js";
import { equalShare, mayLook } from "./weights.js";
import { make, pairName, percent, plural, signed } from "./words.js";

/** A side of the comparison from the address: a head, `pins`, the average of those, or `uniform`. */
function sideIn(text, run) {
  if (text === "pins" || text === "uniform") return text;
  const [found, ...more] = placesIn(text, run);
  return found && !more.length ? keyOf(found) : null;
}

/** What this pane reads of the address. */
export const ADDRESS_OF_COMPARISON = { a: sideIn, b: sideIn };

export function sideName(page, side) {
  const { run, view } = page;
  if (side === "uniform") return "uniform attention";
  if (side === "pins") return `average of the ${placesIn(view.pins, run).length} pinned`;
  return headName(page, placesIn(side, run)[0]);
}

export class ComparePane {
  constructor(page) {
    this.page = page;
    this.canvas = page.find("apart");
    this.job = 0;
    page.find("swap").addEventListener("click", () => page.choose({ a: page.view.b, b: page.view.a }));
    page.find("stop-comparing").addEventListener("click", () => page.choose({ a: null, b: null }));
    const pairAt = (event) => this.found && this.pairAt(event.offsetX, event.offsetY);
    this.canvas.addEventListener("pointermove", (event) => page.hover(this.across(pairAt(event))));
    this.canvas.addEventListener("pointerleave", () => page.hover(null));
    this.canvas.addEventListener("click", (event) => this.take(pairAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** The promise of a side: its name, and the heads that it is the mean of; uniform attention has none. */
  async open(side) {
    const { page } = this;
    const places = side === "uniform" ? [] : placesIn(side === "pins" ? page.view.pins : side, page.run);
    const heads = await Promise.all(places.map(({ layer, head }) => page.run.open(layer, head)));
    return { name: sideName(page, side), heads, places };
  }

  /** The words of the first head's texts, each with that which the other side has in its place, where that is another. */
  wordsOf(sides) {
    const { texts } = this.page;
    const other = sides[1].heads[0] ?? this.head;
    return [["queryText", "rows"], ["keyText", "columns"]].map(([text, places]) => {
      const beside = texts[other.layer[text]];
      return texts[this.head.layer[text]].map((word, at) => {
        const label = beside[inText(other[places], at)]?.label ?? word.label;
        return label === word.label ? word : { ...word, other: label };
      });
    });
  }

  /** A pair of the texts that are compared in those of the chosen head, or back (`way` 1); null where it is not there. */
  across(pair, way = 0) {
    if (!pair) return null;
    const ends = [this.head.layer, this.page.shown.layer];
    const [from, to] = way ? ends.reverse() : ends;
    const at = (place, text) => (place === null || place === undefined ? null
      : inText(placesAcross(this.page.run, from[text], to[text]), place));
    const found = { i: at(pair.i, "queryText"), j: at(pair.j, "keyText") };
    return found.i < 0 || found.j < 0 ? null : found;
  }

  /** The divergence of each query, their mean, the pairs that differ most, and where the map is on its canvas. */
  get numbers() {
    const { byQuery, mean, compared, largest } = this.found;
    const { left, top, across: { cell } } = this.layout;
    return { byQuery: Array.from(byQuery), mean, compared, largest, left, top, cell };
  }

  async paint(shown) {
    const { page } = this;
    const { a, b, pins } = page.view;
    const section = page.find("compare");
    const started = section.hidden && page.host.dataset.shown !== undefined;
    section.hidden = a === null || b === null;
    if (started && !section.hidden) section.scrollIntoView({ block: "nearest" });
    if (section.hidden) {
      this.wanted = this.found = null;
      return;
    }
    const wanted = [a, b, pins, page.host.clientWidth].join();
    if (this.wanted === wanted) {
      if (this.found) this.draw(shown);
      return;
    }
    this.wanted = wanted;
    this.found = null;
    const job = ++this.job;
    delete page.host.dataset.compare;
    const sides = await Promise.all([a, b].map((side) => this.open(side)));
    if (job !== this.job) return;
    const [head] = [...sides[0].heads, ...sides[1].heads];
    for (const side of sides) side.heads = side.heads.map((one) => headBeside(page.run, head.layer, one));
    page.find("compare-title").textContent = `${sides[0].name} − ${sides[1].name}`;
    const objection = objectionTo(...sides);
    page.find("compare-shown").hidden = objection !== null;
    page.find("compare-said").textContent = objection ?? "Comparing …";
    if (objection === null) {
      this.sides = sides;
      this.head = head;
      this.names = this.wordsOf(sides);
      const width = page.find("apart-box").clientWidth - 6;
      this.layout = new Layout(head, this.names, width, Math.max(280, 0.8 * window.innerHeight), window.devicePixelRatio || 1);
      const { down, across } = this.layout;
      const found = await differenceOf(...sides, down.per, across.per, () => job === this.job && this.wanted === wanted);
      if (found === null) return;
      this.found = found;
      this.say();
      this.draw(page.shown);
    }
    page.host.dataset.compare = "drawn";
  }

  hover(pair) {
    if (this.found) this.draw(this.page.shown, pair);
  }

  say() {
    const { mean, compared, leftOut, alone, step } = this.found;
    const { page } = this;
    const { queries } = this.head;
    page.find("compare-said").textContent = compared === 0 ? "No query can be compared: their masks differ, or none sees a key."
      : `They are ${mean.toPrecision(3)} nats apart: the Jensen–Shannon divergence of their weights, a mean over ` +
        `${plural(compared, "query")}. 0 is the same weights, ${Math.LN2.toFixed(3)} nothing in common.` +
        (step > 1 ? ` Every ${step === 2 ? "second" : `${step}th`} query of ${grouped(queries)} is compared.` : "") +
        (alone ? ` Not compared: ${plural(alone, "query")} that only one text has.` : "") +
        (leftOut ? ` ${plural(leftOut, "query")} left out: the masks differ, or leave no key.` : "");
    this.canvas.setAttribute("aria-label", `differences of ${this.sides[0].name} and ${this.sides[1].name}: arrow keys move over the pairs`);
    const [a, b] = this.sides;
    page.find("apart-less").textContent = `${b.name} more`;
    page.find("apart-more").textContent = `${a.name} more`;
    page.find("apart-list").replaceChildren(...this.found.largest.map(({ i, j, a: p, b: q }) => {
      const button = make("button", "other");
      button.append(make("span", "name", pairName(this.names, i, j)),
        make("span", "", `${percent(p)} and ${percent(q)}`),
        make("span", "share", `${signed(100 * (p - q), 1)}`.replace(/^(?=\d)/, "+")));
      button.addEventListener("click", () => this.take({ i, j }));
      const item = make("li");
      item.append(button);
      return item;
    }));
  }

  /** The pair with the largest difference in the cell at a point. */
  pairAt(x, y) {
    const { down, across } = this.layout;
    const { i: row, j: column } = this.layout.pointAt(x, y);
    if (row === null || column === null) return null;
    let best = { i: row, j: column, size: -1 };
    for (let i = row; i < Math.min(this.head.queries, row + down.per); i++) {
      for (let j = column; j < Math.min(this.head.keys, column + across.per); j++) {
        const [p, q] = this.weightsAt(i, j);
        if (Math.abs(p - q) > best.size) best = { i, j, size: Math.abs(p - q) };
      }
    }
    return { i: best.i, j: best.j };
  }

  /** The weights of a pair on both sides; NaN where a text has it not. */
  weightsAt(i, j) {
    const may = mayLook(this.head, i, j);
    return this.sides.map(({ heads }) => (!haveQuery(heads, i) || !haveKey(heads, j) ? NaN : !may ? 0
      : !heads.length ? equalShare(this.head, i)
        : heads.reduce((sum, head) => sum + weightBeside(head, i, j), 0) / heads.length));
  }

  /** Chooses a pair; of another text, with the first head that is compared. */
  take(pair) {
    if (pair === null) return;
    const { view, run, shown } = this.page;
    const places = this.sides.flatMap((side) => side.places);
    const same = places.some(({ layer }) => run.layers[layer].queryText === shown.layer.queryText &&
      run.layers[layer].keyText === shown.layer.keyText);
    const own = same ? this.across(pair) : null;
    const { i, j } = own ?? pair;
    this.page.choose({ ...(own ? {} : places[0]), ...pairOf(view.view, i, j) });
  }

  move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.found) return;
    event.preventDefault();
    const { i, j } = this.across(this.page.shown, 1) ?? {};
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
    this.take({
      i: clamp((i ?? 0) + step[0] * this.layout.down.per, this.head.queries),
      j: clamp((j ?? 0) + step[1] * this.layout.across.per, this.head.keys),
    });
  }

  /** Draws the differences, with the words and the frame of the pair that is looked at. */
  draw({ i, j }, hovered = this.page.hovered) {
    const inside = (at, count) => at !== null && at !== undefined && at < count;
    const at = this.across(hovered ?? { i, j }, 1) ?? {};
    const pair = inside(at.i, this.head.queries) && inside(at.j, this.head.keys) ? at : null;
    const { found, layout, names, page: { theme } } = this;
    drawDifference(this.canvas, found, layout, theme);
    const pen = this.canvas.getContext("2d");
    drawLabels(pen, { names }, layout, theme.colours);
    if (pair) drawCross(pen, { names }, pair, layout, theme.colours);
    this.tell(pair);
    drawRamp(this.page.find("apart-ramp"), signedTables[theme.dark ? "dark" : "light"]);
    const points = (share) => `${share > 0 ? "+" : ""}${signed(100 * share * found.limit, found.limit < 0.1 ? 2 : 0)}`;
    this.page.find("apart-ticks").replaceChildren(...[-1, -0.25, 0, 0.25, 1].map((share) => make("span", "", points(share))));
  }

  /** The pair that is looked at, in words. */
  tell(pair) {
    const say = this.page.find("apart-pair");
    if (pair === null) {
      say.textContent = "";
      return;
    }
    const [p, q] = this.weightsAt(pair.i, pair.j);
    const apart = this.found.byQuery[pair.i];
    const name = pairName(this.names, pair.i, pair.j);
    say.textContent = `${name}: ${p !== p || q !== q ? `${percent(p !== p ? q : p)}; only one text has this pair` : !mayLook(this.head, pair.i, pair.j) ? "masked" : `${percent(p)} and ${percent(q)}`}` +
      (apart === apart ? `; the query's weights are ${apart.toFixed(3)} nats apart` : "");
  }
}
