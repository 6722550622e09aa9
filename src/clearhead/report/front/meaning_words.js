// ---- The words about the numbers of one pair, each in its own unit.

import { MEANINGS } from "./meanings.js";
import { headName } from "./names.js";
import { weightOf } from "./weights.js";
import { percent } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Head, Meaning, Numbers } from "./types.d.ts"
 */

/**
 * The words about what a pair moves: the length of the weighted value, and of what the layer that writes the heads makes
 * of it (Kobayashi et al. 2020), as far as they are known; each with its share of the query's sum.
 *
 * @param {Head} given
 * @param {number} i
 * @param {number} j
 */
export function movesOf(given, i, j) {
  const head = given.plain ?? given;
  /**
   * @param {string} what
   * @param {string} adds
   * @param {Numbers | null} lengths
   */
  const one = (what, adds, lengths) => {
    if (lengths === null) return [];
    const moved = Float64Array.from(lengths, (length, key) => weightOf(head, i, key) * length);
    const all = moved.reduce((sum, one) => sum + one, 0);
    const rank = 1 + moved.reduce((above, one) => above + (one > moved[j] ? 1 : 0), 0);
    return [`${what} = ${moved[j].toPrecision(3)}, the length of what ${adds}: ` +
      `${percent(all > 0 ? moved[j] / all : 0)} of the sum of all keys' lengths, rank ${rank} by length`];
  };
  return [
    ...one("‖weight · value‖", "this key adds to the head's output", head.valueNorms),
    ...one("‖weight · value · W_O‖", "it adds to the layer's result", head.transformedNorms),
  ].join("\n");
}

/**
 * The number of a pair in words, with its unit: "12%", "34% of a mean value".
 *
 * @param {Meaning} meaning
 * @param {number} number
 */
export const numberWords = ({ unit }, number) => percent(number) + unit;

/**
 * The title of the map: "The weights of L3H5", "Output norms of L3H5", "Rollout up to L3".
 *
 * @param {Page} page
 * @param {Meaning} meaning
 */
export function titleOfMap(page, meaning) {
  if (meaning.name === "rollout") return `Rollout up to ${page.labels[page.view.layer]}`;
  const title = isWeights(meaning) ? "The weights" : meaning.title.replace(/^./, (first) => first.toUpperCase());
  return `${title} of ${headName(page, page.view)}`;
}

/** @param {Meaning} meaning */
export const isWeights = (meaning) => meaning === MEANINGS[0];
