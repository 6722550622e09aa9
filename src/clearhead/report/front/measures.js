// ---- The measures of heads, each beside the value of uniform attention under the same mask.

import { numberIn } from "../../base/front/address.js";
import { lastOf } from "../../base/front/numbers.js";
import { plural } from "./words.js";

/** @import { Figure, HeadAt, Heads, Measure } from "./types.d.ts" */

/** @type {Record<string, string>} */
const measureTitles = {
  previous: "previous token", next: "next token", itself: "the token itself", first: "first token",
  "same word": "same word elsewhere", sink: "sink (one key)", distance: "mean distance",
  "weighted value norm": "weighted value norm Σ w‖v‖", "weighted transformed norm": "weighted transformed norm Σ w‖v·W_O‖",
  divergence: "divergence from the other",
};

/** @param {string} name */
export const titleOf = (name) => measureTitles[name] ?? name;

// measures that are multiples of uniform's value, and no shares
export const RATIOS = new Set(["distance", "weighted value norm", "weighted transformed norm"]);
export const NATS = "divergence";
export const ALONE = new Set([NATS]); // measures without a value of uniform attention, for which 0 is the ground
const WORTH_A_NAME = 0.05; // the least weight beyond uniform for a name

const FEWEST = 5; // no head is named by fewer queries

/** @param {HeadAt} given */
export const keyOf = ({ layer, head }) => `${layer}.${head}`;

/**
 * The heads that an address names, such as `2.9_3.1`, each once.
 *
 * @param {string | null} text
 * @param {Heads} run
 * @returns {HeadAt[]}
 */
export function placesIn(text, run) {
  const found = new Map();
  for (const one of (text ?? "").split("_")) {
    const [first, second] = one.split(".");
    const layer = numberIn(first, run.layers.length);
    const head = layer === null ? null : numberIn(second, run.layers[layer].heads.length);
    if (layer !== null && head !== null) found.set(keyOf({ layer, head }), { layer, head });
  }
  return [...found.values()];
}

/**
 * A measure of a head: `value`, `uniform`, and `departs`, how far they are apart: the difference of shares, else the log2
 * of the ratio. `key`: of a sink, which one. Null where it is not known.
 *
 * @param {Heads} run
 * @param {HeadAt} given
 * @param {string} name
 * @returns {Figure | null}
 */
export function figureOf(run, { layer, head }, name) {
  const [value, uniform, key, queries] = run.layers[layer].heads[head].measures?.[name] ?? [NaN, NaN];
  if (!Number.isFinite(value) || !Number.isFinite(uniform)) return null;
  const ratio = uniform > 0 ? Math.max(value / uniform, 2 ** -10) : 1;
  return { value, uniform, key: key ?? null, queries: queries ?? null, departs: RATIOS.has(name) && !ALONE.has(name) ? Math.log2(ratio) : value - uniform };
}

/**
 * A share to two digits, and more where it is near nothing or near all: 71%, 0.81%, 99.97%.
 *
 * @param {number} share
 */
export function shareWords(share) {
  const value = 100 * share;
  if ((value >= 1 && value <= 99) || value === 0 || value === 100) return `${value.toFixed(0)}%`;
  return `${Number(value.toPrecision(value < 1 ? 2 : 4))}%`;
}

/**
 * A value of a measure in words.
 *
 * @param {string} name
 * @param {number} value
 */
export function valueWords(name, value) {
  if (name === NATS) return `${Number(value.toPrecision(2))} nats`;
  if (ALONE.has(name)) return String(Number(value.toPrecision(3)));
  if (!RATIOS.has(name)) return shareWords(value);
  return name === "distance" ? `${value.toFixed(1)} positions` : String(Number(value.toPrecision(3)));
}

/**
 * ", over 31 queries", of a measure; "" where their number is not known.
 *
 * @param {number | null | undefined} queries
 */
export const queriesWords = (queries) => (queries === null || queries === undefined ? "" : `, over ${plural(queries, "query")}`);

/**
 * "previous token 71%; uniform attention: 4%, over 31 queries"
 *
 * @param {string} name
 * @param {Figure | null} figure
 */
export const figureWords = (name, figure) => `${titleOf(name)} ${figure === null ? "–" : valueWords(name, figure.value)}` +
  (figure === null ? ", not known" : ALONE.has(name) ? "" : `; uniform attention: ${valueWords(name, figure.uniform)}`) +
  queriesWords(figure?.queries);

/**
 * The departure that has the strongest colour: a round number that no head of the page exceeds by much.
 *
 * @param {string} name
 * @param {(Figure | null)[]} figures
 */
export function limitOf(name, figures) {
  const most = figures.reduce((largest, figure) => Math.max(largest, Math.abs(figure?.departs ?? 0)), 0);
  if (ALONE.has(name) && name !== NATS && most > 0) {
    const digit = 10 ** Math.floor(Math.log10(most)); // rounded up to one digit
    return Number((Math.ceil(most / digit - 1e-9) * digit).toPrecision(1));
  }
  const steps = RATIOS.has(name) ? [1, 2, 3, 4, 6] : [WORTH_A_NAME, 0.1, 0.2, 0.5, 1];
  return steps.find((step) => step >= most) ?? lastOf(steps);
}

/**
 * What the ends and the middle of the colours mean: "−50", "≤ 1/8 ×".
 *
 * @param {string} name
 * @param {number} limit
 * @param {boolean} [below] whether no head is above uniform attention
 */
export function limitWords(name, limit, below = false) {
  if (name === NATS) return ["the same weights", `${limit} nats`];
  if (ALONE.has(name)) return [String(-limit), "0", String(limit)];
  const words = RATIOS.has(name) ? [`≤ 1/${2 ** limit} ×`, "1 × uniform attention", `≥ ${2 ** limit} ×`]
    : [`−${100 * limit}`, "percentage points from uniform attention", `+${100 * limit}`];
  return below ? words.slice(0, 2) : words;
}

/**
 * The heads from the largest value of a measure to the least; by entropy, the most focused head is first.
 *
 * @template {{ figure: Figure | null }} Entry
 * @param {string} name
 * @param {Entry[]} entries
 */
export function rankedBy(name, entries) {
  const way = name === "normalised entropy" ? 1 : -1;
  /** @param {Entry} entry */
  const place = ({ figure }) => (figure === null ? Infinity : way * figure.departs);
  return entries.slice().sort((a, b) => (place(a) === place(b) ? 0 : place(a) - place(b)));
}

/**
 * The heads that depart most from uniform, at most five, each by the measure by which it departs most: first each by
 * another measure, then by any.
 *
 * @param {Heads} run
 * @param {HeadAt[]} places
 * @returns {{ place: HeadAt, measure: Measure, figure: Figure }[]}
 */
export function mostDistinctive(run, places) {
  const measures = run.measures.filter(({ does }) => does);
  const every = places.flatMap((place) => measures.flatMap((measure) => {
    const figure = figureOf(run, place, measure.name);
    if (figure === null || figure.departs < WORTH_A_NAME || (figure.queries ?? FEWEST) < FEWEST) return [];
    const first = measure.name === "sink" ? figureOf(run, place, "first") : null;
    const same = first && Math.abs(first.departs - figure.departs) < 1e-4; // the sink is the first token
    return same ? [] : [{ place, measure, figure }];
  }).sort((a, b) => b.figure.departs - a.figure.departs).slice(0, 1));
  every.sort((a, b) => b.figure.departs - a.figure.departs);
  const first = every.filter((one, at) => every.findIndex(({ measure }) => measure === one.measure) === at);
  const found = [...first, ...every.filter((one) => !first.includes(one))].slice(0, 5);
  return found.sort((a, b) => b.figure.departs - a.figure.departs);
}
