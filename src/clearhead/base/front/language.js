// ---- A step as a tree, as `base/symbolic/expressions.py` gives it.
//
// A tree is {kind: "name" | "value" | "call"}: a call has its `name`, its `inputs` (trees) and `options` by name. Every
// operator and method is a call: `a @ b` is matmul(a, b), `a.sum(-1)` is sum(a, -1), `torch.exp(a)` is exp(a),
// `[a, b]` and `(a, b)` are list(a, b), `a[..., 0:2]` is index(a, "...", {from: 0, to: 2}). A value is a number, the
// name of a type, or a place of an index; a number that JSON lacks is its name.

/** @import { Constant, Tree, ValueTree } from "./types.d.ts" */

/** @type {Record<string, number>} */
const CONSTANTS = { inf: Infinity, "-inf": -Infinity, nan: NaN };

/**
 * The constant of a value: Python's True is 1.
 *
 * @param {ValueTree} tree
 * @returns {Constant}
 */
export function constantIn({ value }) {
  if (typeof value === "boolean") return Number(value);
  return typeof value === "string" && Object.hasOwn(CONSTANTS, value) ? CONSTANTS[value] : value;
}

/**
 * A tree and all trees inside it.
 *
 * @param {Tree} tree
 * @returns {Generator<Tree>}
 */
function* allTrees(tree) {
  yield tree;
  if (tree.kind !== "call") return;
  for (const inner of [...tree.inputs, ...Object.values(tree.options)]) yield* allTrees(inner);
}

/**
 * The names that a tree reads, or the operations that it calls, each once, in order.
 *
 * @param {"name" | "call"} kind
 */
const namesOf = (kind) => (/** @type {Tree} */ tree) =>
  [...new Set([...allTrees(tree)].flatMap((inner) => (inner.kind === kind ? [inner.name] : [])))];
export const namesIn = namesOf("name");
export const callsIn = namesOf("call");

/**
 * The tree with `change(tree)` in the place of each inner tree for which that is not null.
 *
 * @param {Tree} tree
 * @param {(tree: Tree) => Tree | null} change
 * @returns {Tree}
 */
export function changed(tree, change) {
  const other = change(tree);
  if (other) return other;
  return tree.kind === "call" ? { ...tree, inputs: tree.inputs.map((inner) => changed(inner, change)) } : tree;
}
