// ---- The steps of an explanation of one weight, computed from one query and all keys.
//
// Python gives the names, the formulas and the trees of the steps (`why` of a layer); the numbers are this row's.

import { make } from "../../base/front/dom.js";
import { everyIndex, number, placeOf, sizeOf } from "../../base/front/numbers.js";
import { nodeOf } from "../../base/front/operations.js";
import { leaf, plainText, setMostTerms } from "../../base/front/terms.js";
import { biasOf, countsOf, dot, mayLook } from "./weights.js";

/**
 * @import { Computed } from "../../base/front/types.d.ts"
 * @import { Run } from "./data.js"
 * @import { Found, Head, WhyStep } from "./types.d.ts"
 */

setMostTerms(3);
export const LONG = 2048; // a row of more keys is computed only when the page is at rest

/**
 * An array as a node: `sizes` are its axes.
 *
 * @param {string} name
 * @param {ArrayLike<number>} values
 * @param {number[]} sizes
 * @param {(value: number) => string} [text]
 * @returns {Computed}
 */
const nodeOver = (name, values, sizes, text = number) => ({
  axes: sizes.map((n) => ({ n, more: 0 })),
  at: (index) => values[placeOf(index, sizes)],
  term: (index) => leaf(text(values[placeOf(index, sizes)]), { step: name, index: [...index] }),
});

/**
 * The given steps of query i. Every array has the axes (B, H, Lq, …) of the explanation, here of size 1.
 *
 * @param {Head} head
 * @param {number} i
 * @returns {Record<string, () => Computed>}
 */
function givenOf(head, i) {
  const { features, keys } = head;
  /** @param {(j: number) => number} value */
  const row = (value) => Float64Array.from({ length: keys }, (_, j) => value(j));
  return {
    query: () => nodeOver("query", head.query.subarray(i * features, (i + 1) * features), [1, 1, 1, features]),
    key: () => nodeOver("key", head.key, [1, 1, keys, features]),
    weight: () => nodeOver("weight", head.weight ?? [], [features]),
    bias: () => nodeOver("bias", row((j) => {
      const bias = biasOf(head, i, j);
      return bias === -Infinity ? 0 : bias; // −∞ stands for a hidden pair
    }), [1, 1, 1, keys]),
    mask: () => nodeOver("mask", row((j) => Number(mayLook(head, i, j))), [1, 1, 1, keys], (x) => (x ? "True" : "False")),
    sink: () => nodeOver("sink", [head.sink ?? 0], [1, 1, 1, 1]),
  };
}

/**
 * The numbers of a step, which later steps read. `first`: the first that is computed, the sum of the terms of each key.
 *
 * @param {Head} head
 * @param {number} i
 * @param {Computed} made
 * @param {number[]} sizes
 * @param {boolean} first
 */
function numbersOf(head, i, made, sizes, first) {
  const values = new Float64Array(sizeOf(sizes));
  if (first) return values.map((_, j) => dot(head, i, j));
  let place = 0;
  everyIndex(sizes, (index) => { values[place++] = made.at(index); });
  return values;
}

/**
 * The steps of row i, by name: each with its formula, its numbers, and its terms written out.
 *
 * @param {Head} head
 * @param {number} i
 * @param {Run} run
 * @returns {Map<string, WhyStep>}
 */
export function whyOf(head, i, run) {
  if (head.why?.row === i) return head.why.steps;
  const given = givenOf(head, i);
  const found = new Map();
  const ordinary = run.steps[head.layer.why];
  const blind = countsOf(head)[i] === 0 ? run.steps[head.layer.whyBlind] : [];
  for (const { name, formula, tree } of blind.length ? blind : ordinary) {
    if (!tree) {
      found.set(name, { name, formula, node: given[name](), found: null });
      continue;
    }
    const made = nodeOf(tree, found);
    const sizes = made.axes.map((axis) => axis.n);
    const numbers = numbersOf(head, i, made, sizes, ![...found.values()].some((step) => step.found));
    found.set(name, { name, formula, node: nodeOver(name, numbers, sizes), found: { made, sizes, numbers } });
  }
  head.why = { row: i, steps: found };
  return found;
}

/**
 * The number of a computed step for key j, or the only number of a step with one number for each row.
 *
 * @param {Found} step
 * @param {number} j
 */
export function numberAt(step, j) {
  const index = step.sizes.map((n, axis) => (axis === 3 && n > 1 ? j : 0));
  return { value: step.numbers[placeOf(index, step.sizes)], made: plainText(step.made.term(index).pieces) };
}

/**
 * Each step that leads to the weight of a pair, with its number and its written terms.
 *
 * @param {Head} head
 * @param {number} i
 * @param {number} j
 * @param {Run} run
 * @param {HTMLElement} target
 */
export function paintWhy(head, i, j, run, target) {
  const rows = [...whyOf(head, i, run).values()].flatMap((step) => {
    if (!step.found) return [];
    const { value, made } = numberAt(step.found, j);
    const row = make("tr");
    const heading = make("th");
    heading.scope = "row";
    heading.append(make("span", "formula", step.formula), make("span", "made", `= ${made}`));
    row.append(heading, make("td", "", number(value)));
    row.dataset.step = step.name;
    return [row];
  });
  target.replaceChildren(...rows);
}
