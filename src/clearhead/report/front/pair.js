// ---- One pair: the steps to its weight, its weighted value, and the strongest other pairs.

import { everyIn, make } from "../../base/front/dom.js";
import { grouped } from "../../base/front/numbers.js";
import { barOf, signedBarOf } from "./bar.js";
import { receivedRatios } from "./marks.js";
import { isWeights, movesOf, numberWords } from "./meaning_words.js";
import { oneText } from "./view.js";
import { countsOf, entropyOf, mayLook, sinkShareOf, term } from "./weights.js";
import { LONG, paintWhy } from "./why.js";
import { nameOf, percent, placeWords, signed, times } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Head, Look, Shown, Sketch } from "./types.d.ts"
 */

const LISTED = 8;
const TERMS = 6; // dimensions of a score that are shown, the largest first

/**
 * The terms of a pair's score: one for each dimension, or for two that rotary positions turn together.
 *
 * @param {Head} head
 * @param {number} i
 * @param {number} j
 */
function termsOf(head, i, j) {
  const { pairs } = head.layer;
  /** @param {number} d */
  const one = (d) => term(head, i, j, d) * head.scale;
  const turned = new Set(pairs.flatMap(([a, b]) => [a, b]));
  const found = pairs.map(([a, b, period]) => ({
    order: a, value: one(a) + one(b),
    name: `${period === null ? "" : `one turn in ${turnWords(period)}, `}dimensions ${a} and ${b}`,
  }));
  for (let d = 0; d < head.features; d++) if (!turned.has(d)) found.push({ order: d, value: one(d), name: `dimension ${d}` });
  return found;
}

/**
 * "6.3 positions", "1,200 positions"
 *
 * @param {number} period
 */
const turnWords = (period) => `${period < 100 ? Number(period.toPrecision(2)) : grouped(Number(period.toPrecision(2)))} positions`;

export class PairPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.waiting = undefined;
    /** @type {Look | null} the weights that are listed */
    this.listed = null;
    for (const [name, button] of [["detail", "sheet"], ["overview", "more-heads"]]) { // parts of which narrow screens show little
      page.find(button).addEventListener("click", ({ currentTarget }) => {
        const open = page.find(name).toggleAttribute("data-open");
        if (currentTarget instanceof HTMLElement) currentTarget.setAttribute("aria-expanded", String(open));
      });
    }
    this.terms = page.find("terms", HTMLDetailsElement);
    this.terms.addEventListener("toggle", () => this.paintTerms(page.shown));
  }

  /** @param {Shown} shown */
  paint(shown) {
    this.listed = null;
    this.page.find("pair-pinned").hidden = true;
    this.say(shown, shown.look, shown.pair);
    this.paintRest(shown);
  }

  /**
   * Shows all that stands below the name of the pair.
   *
   * @param {Shown} shown
   */
  paintRest(shown) {
    const { look, pair, i, j, names, head, layer } = shown;
    const out = look.view === "out";
    const name = nameOf(names[out ? 0 : 1], look.token);
    this.page.find("strongest-title").hidden = look.allowed.length === 0;
    this.page.find("strongest-title").textContent =
      !isWeights(shown.meaning) ? `${out ? "Keys" : "Queries"} with the largest numbers for “${name}”`
        : out ? `Keys that “${name}” gives most weight` : `Queries that give “${name}” most weight`;
    // a score that is no product has no steps here; a score that was given as a matrix has no terms either
    const rolled = Boolean(head.shares); // a rollout is of several layers
    this.page.find("why").hidden = rolled || pair === null || this.page.run.steps[layer.why].length === 0;
    this.terms.hidden = rolled || pair === null || head.features === 0;
    const each = layer.pairs.length ? "rotary frequency" : "dimension";
    this.page.find("terms-title").textContent = `What each ${each} adds to the score`;
    if (i !== null && j !== null) {
      this.paintSum(shown, i, j);
      this.paintTerms(shown);
    }
    if (look !== this.listed) { // else a pointer on the list would have its row made anew
      this.paintStrongest(shown);
      this.paintFacts(shown);
    }
    this.listed = look;
  }

  /**
   * The pair, its weight and its place among the others, in words.
   *
   * @param {Shown} given
   * @param {Look} look
   * @param {number | null} pair
   */
  say({ names }, look, pair) {
    const out = look.view === "out";
    const title = this.page.find("pair-title");
    const place = this.page.find("pair-place");
    const moves = this.page.find("pair-moves");
    moves.hidden = pair === null || look.head.valueNorms === null || Boolean(look.head.shares);
    if (pair === null) {
      title.textContent = `“${nameOf(names[out ? 0 : 1], look.token)}”`;
      place.textContent = out
        ? "The mask leaves this query no key: all its weights are 0."
        : "The mask hides this key from every query: all its weights are 0.";
      return;
    }
    const [i, j] = out ? [look.token, pair] : [pair, look.token];
    const weight = mayLook(look.head, i, j) ? numberWords(this.page.now.meaning, look.weights[pair]) : "masked";
    title.textContent = `“${nameOf(names[0], i)}” → “${nameOf(names[1], j)}” ${weight}`;
    place.textContent = placeWords(look, pair, names);
    if (!moves.hidden) moves.textContent = movesOf(look.head, i, j);
  }

  /** While a pair is pointed at, its name, its weight and its place; and the name of the chosen token, which comes back. */
  hover() {
    const { current, now } = this.page;
    this.say(current, current.look, current.pair);
    const pinned = this.page.find("pair-pinned");
    pinned.hidden = current.look === now.look;
    pinned.textContent = `In passing. “${nameOf(now.names[now.view === "out" ? 0 : 1], now.look.token)}” stays chosen.`;
  }

  /** @param {Shown} shown */
  linger(shown) {
    this.paintRest(shown);
  }

  /**
   * Shows the steps of the weight; of a long row only once the choice has rested for a moment.
   *
   * @param {Shown} given
   * @param {number} i
   * @param {number} j
   */
  paintSum({ head }, i, j) {
    clearTimeout(this.waiting);
    const target = this.page.find("sum", HTMLTableElement).tBodies[0];
    const { run } = this.page;
    if (head.keys <= LONG || head.why?.row === i) {
      paintWhy(head, i, j, run, target);
    } else {
      target.replaceChildren();
      this.waiting = setTimeout(() => paintWhy(head, i, j, run, target), 250);
    }
  }

  /**
   * The term of each dimension or frequency in the score, the largest first, and the sum of the rest.
   *
   * @param {Shown | Sketch | null} shown
   */
  paintTerms(shown) {
    if (!this.terms.open || this.terms.hidden || !shown?.look) return;
    const { head, i, j } = shown;
    if (i === null || j === null) return;
    const terms = termsOf(head, i, j);
    terms.sort((a, b) => Math.abs(b.value) - Math.abs(a.value) || a.order - b.order);
    const first = terms.slice(0, TERMS);
    const most = Math.abs(first[0].value) || 1;
    const rest = terms.slice(TERMS);
    /** @param {{ value: number }[]} some */
    const sum = (some) => some.reduce((total, { value }) => total + value, 0);
    /**
     * @param {string} words
     * @param {number} value
     */
    const row = (words, value) => {
      const item = make("li", "term");
      item.append(make("span", "name", words), signedBarOf(value / most), make("span", "share", signed(value, 3)));
      return item;
    };
    const rows = first.map(({ name, value }) => row(name, value));
    if (rest.length) rows.push(row(`the other ${rest.length}`, sum(rest)));
    this.page.find("term-list").replaceChildren(...rows);
    this.page.find("term-sum").textContent =
      `sum ${signed(sum(terms), 3)}: the score of query and key, before softcap, bias and softmax`;
  }

  /** @param {Shown} given */
  paintStrongest({ look, pair, names }) {
    const out = look.view === "out";
    const text = names[out ? 1 : 0];
    const shown = look.ranked.slice(0, LISTED);
    const list = this.page.find("strongest");
    const hadFocus = list.contains(this.page.root.activeElement);
    list.replaceChildren(...shown.map((other) => {
      const button = make("button", "other");
      button.title = `weight ${look.weights[other].toPrecision(9)}`;
      if (other === pair) button.setAttribute("aria-current", "true");
      const label = make("span", "name");
      label.append(make("bdi", "", text[other].label), make("span", "at", ` ${other}`));
      const bar = barOf((100 * look.weights[other]) / (look.weights[shown[0]] || 1));
      button.append(label, bar, make("span", "share", percent(look.weights[other])));
      button.addEventListener("click", () => this.page.choose({ pair: other }));
      button.addEventListener("pointerenter", () => {
        this.page.hover(out ? { i: look.token, j: other } : { i: other, j: look.token });
      });
      button.addEventListener("pointerleave", () => this.page.hover(null));
      const item = make("li");
      item.append(button);
      return item;
    }));
    if (hadFocus) everyIn(list, list.querySelector("[aria-current]") ? "[aria-current]" : "button", HTMLElement)[0]?.focus();
    const rest = look.allowed.length - shown.length;
    if (rest > 0) {
      const left = look.sum - shown.reduce((sum, other) => sum + look.weights[other], 0);
      const share = Math.max(0, left);
      const words = out ? percent(share) : `${percent(share / rest)} each on average`;
      list.append(make("li", "rest", `the other ${grouped(rest)}: ${words}`));
    }
  }

  /** @param {Shown} given */
  paintFacts({ head, look, layer, meaning }) {
    const at = look.token;
    const facts = [];
    const seen = countsOf(head)[at];
    if (!isWeights(meaning)) facts.push(["sum", numberWords(meaning, look.sum)]);
    else if (look.view === "out" && seen > 0) {
      facts.push(["keys it sees", `${grouped(seen)}; uniform attention would give each ${percent(1 / seen)}`]);
      const entropy = entropyOf(look);
      const alike = Number(Math.exp(entropy).toPrecision(2));
      facts.push(["entropy", `${entropy.toFixed(2)} nats of at most ${Math.log(seen).toFixed(2)}`]);
      facts.push(["effective keys", `${grouped(alike)} = exp(entropy)`]);
      if (head.distance) facts.push(["mean distance", `${head.distance[at].toFixed(1)} positions, weighted by attention`]);
      const sink = sinkShareOf(head, at);
      if (sink > 0.001) facts.push(["weight on no key", `${percent(sink)}, the share of the sink in the softmax`]);
      if (look.sum + sink < 0.999) facts.push(["weight on padding", `${percent(1 - look.sum - sink)}; padding is not shown`]);
    }
    if (look.view === "in" || oneText(layer)) {
      const received = head.received[at];
      const ratio = receivedRatios(head)[at];
      const share = ratio === ratio ? `, ${times(ratio)} its share under uniform attention` : "";
      const all = Float64Array.from(head.received).reduce((sum, one) => sum + one, 0);
      const what = isWeights(meaning) ? "the head's attention" : "the sum of all pairs";
      facts.push([isWeights(meaning) ? "weight received" : "received",
        `as a key, from all queries: ${percent(all > 0 ? received / all : 0)} of ${what}${share}`]);
    }
    this.page.find("facts").replaceChildren(
      ...facts.flatMap(([term, words]) => [make("dt", "", term), make("dd", "", words)]),
    );
  }
}
