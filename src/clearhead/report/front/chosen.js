// ---- Several tokens at once: their names in an address, and the mean of their weights.

import { ARCS, keepStrongest } from "./arcs.js";
import { breathe, countsOf, mayLook, weightOf } from "./weights.js";

/**
 * @import { Direction, Head, Look, Readers, Shading, WeightedPair } from "./types.d.ts"
 * @import { View } from "./view.js"
 */

/**
 * Positions as an address holds them, such as `3-7.9`.
 *
 * @param {Iterable<number>} positions
 */
export function rangesOf(positions) {
  /** @type {[number, number][]} */
  const ranges = [];
  for (const at of [...positions].sort((a, b) => a - b)) {
    const last = ranges[ranges.length - 1];
    if (last && at === last[1] + 1) last[1] = at;
    else ranges.push([at, at]);
  }
  return ranges.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(".");
}

/**
 * The positions below `count` that an address names, in order; none where the address is invalid.
 *
 * @param {string | null} text
 * @param {number} count
 */
export function fromRanges(text, count) {
  const found = new Set();
  if (text === null || !/^\d+(-\d+)?(\.\d+(-\d+)?)*$/.test(text)) return [];
  for (const range of text.split(".")) {
    const [from, to = from] = range.split("-").map(Number);
    for (let at = from; at <= Math.min(to, count - 1); at++) found.add(at);
  }
  return [...found].sort((a, b) => a - b);
}

/** @satisfies {Readers} what is read of the address: several tokens */
export const ADDRESS_OF_TOKENS = {
  tokens: (text, run) => {
    const most = Math.max(...run.layers.map(({ queries, keys }) => Math.max(queries, keys)));
    const positions = fromRanges(text, most);
    return positions.length > 1 ? rangesOf(positions) : null;
  },
};

/**
 * The chosen tokens: all that were chosen together, or the single one.
 *
 * @param {View} view
 */
export function chosenOf(view) {
  const together = fromRanges(view.tokens, view.lengths[0]);
  return together.includes(view.token) ? together : [view.token];
}

/**
 * The mean of the weights of some tokens, `weights`, and of what they would be if each query looked at all it may see
 * alike, `fair`; for each other token. `strongest`: the strongest pairs, [weight, query, key]. Null if `wanted()` turns false before it is computed.
 *
 * @param {Head} head
 * @param {Direction} view
 * @param {number[]} tokens
 * @param {() => boolean} wanted
 * @returns {Promise<Omit<Shading, "view" | "tokens"> | null>}
 */
export async function meanLook(head, view, tokens, wanted) {
  const out = view === "out";
  const counts = countsOf(head);
  const length = out ? head.keys : head.queries;
  const weights = new Float64Array(length);
  const fair = new Float64Array(length);
  /** @type {WeightedPair[]} */
  const strongest = [];
  let since = performance.now();
  for (const token of tokens) {
    for (let other = 0; other < length; other++) {
      const [i, j] = out ? [token, other] : [other, token];
      if (!mayLook(head, i, j)) continue;
      const weight = weightOf(head, i, j);
      keepStrongest(strongest, weight, i, j);
      weights[other] += weight / tokens.length;
      fair[other] += 1 / counts[i] / tokens.length;
    }
    if (performance.now() - since < 30) continue;
    await breathe();
    if (!wanted()) return null;
    since = performance.now();
  }
  return { weights, fair, strongest };
}

/**
 * The same for one token whose weights are known.
 *
 * @param {Look} given
 * @returns {Omit<Shading, "view" | "tokens">}
 */
export function oneLook({ head, view, token, weights, ranked }) {
  const counts = countsOf(head);
  const fair = new Float64Array(weights.length);
  /**
   * @param {number} other
   * @returns {[number, number]}
   */
  const at = (other) => (view === "out" ? [token, other] : [other, token]);
  for (const other of ranked) fair[other] = 1 / counts[at(other)[0]];
  const strongest = ranked.slice(0, ARCS).filter((other) => weights[other] > 0);
  return { weights, fair, strongest: strongest.map((other) => [weights[other], ...at(other)]) };
}
