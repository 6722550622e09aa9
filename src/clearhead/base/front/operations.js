// ---- The operations of the language, entry by entry: their axes, their numbers, and each number written out.
//
// A node is {axes, at(index), term(index)}: axes are [{n, more}], `more` being entries that this page does not hold.
// Nothing between the steps is kept; only a step's own numbers are (see steps.js).

import { constantIn } from "./language.js";
import { lastOf } from "./numbers.js";
import { axisOf, constantOf, lengthOf, rearrangements, valueNode, valueOf } from "./shapes.js";
import { between, BINDS, bracketed, called, sumOf, times } from "./terms.js";

/** @import { Computed, ConstantNode, Extent, Given, Named, Term, Tree } from "./types.d.ts" */

/**
 * An index of a result as one of an input that broadcasts to it.
 *
 * @param {number[]} index
 * @param {Extent[]} axes
 */
function broadcastIndex(index, axes) {
  const skip = index.length - axes.length;
  return axes.map((axis, n) => (axis.n === 1 ? 0 : index[n + skip]));
}

/** @param {{ axes: Extent[] }[]} nodes */
function broadcastAxes(nodes) {
  const depth = Math.max(...nodes.map((node) => node.axes.length));
  return Array.from({ length: depth }, (_, n) => {
    const mine = nodes.map((node) => node.axes[n - depth + node.axes.length]).filter((axis) => axis);
    const wide = mine.filter((axis) => axis.n !== 1);
    if (wide.some((axis) => axis.n !== wide[0].n)) throw new Error("sizes do not broadcast");
    return wide[0] ?? mine[0];
  });
}

/**
 * Entry by entry: `compute` of the numbers, `write` of the terms, which may ask for the number of each.
 *
 * @param {(...numbers: number[]) => number} compute
 * @param {(terms: Term[], at: (n: number) => number) => Term} write
 */
const entrywise = (compute, write) => (/** @type {Computed[]} */ ...nodes) => ({
  axes: broadcastAxes(nodes),
  at: (/** @type {number[]} */ index) => compute(...nodes.map((node) => node.at(broadcastIndex(index, node.axes)))),
  term: (/** @type {number[]} */ index) => {
    const inner = nodes.map((node) => broadcastIndex(index, node.axes));
    return write(nodes.map((node, n) => node.term(inner[n])), (n) => nodes[n].at(inner[n]));
  },
});

/**
 * @param {(a: number, b: number) => boolean} test
 * @param {string} sign
 */
const compared = (test, sign) => entrywise(
  (a, b) => Number(test(a, b)),
  ([a, b]) => between(a, ` ${sign} `, b, BINDS.compare, BINDS.sum, BINDS.sum),
);

/**
 * @param {(a: number) => number} compute
 * @param {string} name
 */
const unary = (compute, name) => entrywise(compute, ([a]) => called(name, a));

/**
 * @param {Term} term
 * @returns {Term}
 */
const squared = (term) => ({ binds: BINDS.power, pieces: [...bracketed(term, BINDS.atom), "²"] });

/**
 * The term, and the places of the other term, which decided between two terms, without their text.
 *
 * @param {Term} term
 * @param {Term} other
 * @returns {Term}
 */
const withUnseen = (term, other) => ({
  binds: term.binds,
  pieces: [...term.pieces, ...other.pieces.filter((piece) => typeof piece !== "string").map((piece) => ({ ...piece, text: "" }))],
});

/**
 * A reduction over one axis: `compute(values)`, and `write(values, termOf, more)`.
 *
 * @param {(values: number[]) => number} compute
 * @param {(values: number[], termOf: (k: number) => Term, more: number) => Term} write
 */
const reduction = (compute, write) => (
  /** @type {Computed} */ node,
  /** @type {ConstantNode | undefined} */ axisNode,
  /** @type {Record<string, ConstantNode>} */ options = {},
) => {
  const axis = axisOf(node, constantOf(options.dim ?? axisNode));
  const keep = options.keepdim ? Boolean(constantOf(options.keepdim)) : false;
  const { n, more } = node.axes[axis];
  /**
   * @param {number[]} index
   * @param {number} k
   */
  const inner = (index, k) => [...index.slice(0, axis), k, ...index.slice(axis + (keep ? 1 : 0))];
  /** @param {number[]} index */
  const values = (index) => Array.from({ length: n }, (_, k) => node.at(inner(index, k)));
  return {
    axes: node.axes.flatMap((one, a) => (a !== axis ? [one] : keep ? [{ n: 1, more: 0 }] : [])),
    at: (/** @type {number[]} */ index) => compute(values(index)),
    term: (/** @type {number[]} */ index) => write(values(index), (k) => node.term(inner(index, k)), more),
  };
};

/** @param {number[]} values */
const added = (values) => values.reduce((sum, x) => sum + x, 0);

/** @param {number[]} values */
const maximumOf = (values) => values.reduce((a, b) => (Number.isNaN(a) || a > b ? a : b), -Infinity);

/** @param {string} name */
const listed = (name) => (/** @type {number[]} */ values, /** @type {(k: number) => Term} */ termOf, /** @type {number} */ more) => ({
  binds: BINDS.atom,
  pieces: [`${name}(`, ...sumOf(values, termOf, more, ", ").pieces, ")"],
});

/**
 * @param {Computed} left
 * @param {Computed} right
 * @returns {Computed}
 */
function matmul(left, right) {
  const vector = right.axes.length === 1;
  const inner = lastOf(left.axes);
  const lead = vector ? left.axes.slice(0, -1)
    : broadcastAxes([{ axes: left.axes.slice(0, -2) }, { axes: right.axes.slice(0, -2) }]);
  const axes = vector ? lead : [...lead, left.axes[left.axes.length - 2], lastOf(right.axes)];
  if (right.axes[vector ? 0 : right.axes.length - 2].n !== inner.n) throw new Error("widths of a product differ");
  /**
   * @param {number[]} index
   * @param {number} k
   */
  const leftAt = (index, k) => vector ? [...index, k]
    : [...broadcastIndex(index.slice(0, -2), left.axes.slice(0, -2)), index[index.length - 2], k];
  /**
   * @param {number[]} index
   * @param {number} k
   */
  const rightAt = (index, k) => vector ? [k]
    : [...broadcastIndex(index.slice(0, -2), right.axes.slice(0, -2)), k, lastOf(index)];
  /** @param {number[]} index */
  const products = (index) =>
    Array.from({ length: inner.n }, (_, k) => left.at(leftAt(index, k)) * right.at(rightAt(index, k)));
  return {
    axes,
    at: (index) => added(products(index)),
    term: (index) => sumOf(
      products(index), (k) => times(left.term(leftAt(index, k)), right.term(rightAt(index, k))), inner.more,
    ),
  };
}

/**
 * @param {Computed} node
 * @param {ConstantNode} where
 * @returns {Computed}
 */
function softmax(node, where) {
  const axis = axisOf(node, constantOf(where));
  const { n, more } = node.axes[axis];
  /**
   * @param {number[]} index
   * @param {number} k
   */
  const inner = (index, k) => index.map((x, a) => (a === axis ? k : x));
  /** @param {number[]} index */
  const powers = (index) => {
    const values = Array.from({ length: n }, (_, k) => node.at(inner(index, k)));
    const top = maximumOf(values);
    return values.map((x) => Math.exp(x - top));
  };
  /** @param {number[]} index */
  const power = (index) => called("exp", node.term(index));
  return {
    axes: node.axes,
    at: (index) => {
      const all = powers(index);
      return all[index[axis]] / added(all);
    },
    term: (index) => between(
      power(index), " / ", sumOf(powers(index), (k) => power(inner(index, k)), more), BINDS.product,
      BINDS.product, BINDS.unary,
    ),
  };
}

/**
 * Of a node whose last axis is a table: for each entry of `places`, the number of the table that it names.
 *
 * @param {Computed} node
 * @param {Computed} places
 * @param {ConstantNode} where
 * @returns {Computed}
 */
function takeAlong(node, places, where) {
  if (axisOf(node, constantOf(where)) !== node.axes.length - 1) throw new Error("this page looks up along the last axis");
  lengthOf(lastOf(node.axes));
  const lead = [node, places].map(({ axes }) => ({ axes: axes.slice(0, -1) }));
  /** @param {number[]} index */
  const placeAt = (index) => broadcastIndex(index, places.axes);
  /** @param {number[]} index */
  const indexOf = (index) => [...broadcastIndex(index.slice(0, -1), lead[0].axes), places.at(placeAt(index))];
  return {
    axes: [...broadcastAxes(lead), lastOf(places.axes)],
    at: (index) => node.at(indexOf(index)),
    term: (index) => withUnseen(node.term(indexOf(index)), places.term(placeAt(index))),
  };
}

const inFloat32 = entrywise(Math.fround, ([a]) => a);

export const operations = {
  add: entrywise((a, b) => a + b, ([a, b]) => between(a, " + ", b, BINDS.sum, BINDS.sum, BINDS.product)),
  sub: entrywise((a, b) => a - b, ([a, b]) => between(a, " - ", b, BINDS.sum, BINDS.sum, BINDS.product)),
  mul: entrywise((a, b) => a * b, ([a, b]) => times(a, b)),
  div: entrywise((a, b) => a / b, ([a, b]) => between(a, " / ", b, BINDS.product, BINDS.product, BINDS.unary)),
  pow: entrywise((a, b) => a ** b, ([a, b], at) => (at(1) === 2 ? squared(a) : called("power", a, b))),
  neg: entrywise((a) => -a, ([a]) => ({ binds: BINDS.unary, pieces: ["-", ...bracketed(a, BINDS.product)] })),
  le: compared((a, b) => a <= b, "≤"), lt: compared((a, b) => a < b, "<"),
  ge: compared((a, b) => a >= b, "≥"), gt: compared((a, b) => a > b, ">"),
  eq: compared((a, b) => a === b, "="), ne: compared((a, b) => a !== b, "≠"),
  and: entrywise((a, b) => a & b, ([a, b]) => between(a, " and ", b, BINDS.compare, BINDS.sum, BINDS.sum)),
  or: entrywise((a, b) => a | b, ([a, b]) => between(a, " or ", b, BINDS.compare, BINDS.sum, BINDS.sum)),
  not: entrywise((a) => 1 - a, ([a]) => ({ binds: BINDS.unary, pieces: ["not ", ...bracketed(a, BINDS.unary)] })),
  exp: unary(Math.exp, "exp"), cos: unary(Math.cos, "cos"), sin: unary(Math.sin, "sin"), tanh: unary(Math.tanh, "tanh"),
  abs: unary(Math.abs, "abs"), sqrt: unary(Math.sqrt, "√"),
  square: entrywise((a) => a * a, ([a]) => squared(a)),
  maximum: entrywise((a, b) => maximumOf([a, b]), ([a, b]) => called("max", a, b)),
  masked_fill: entrywise(
    (a, mask, fill) => (mask ? fill : a), ([a, mask, fill], at) => withUnseen(at(1) ? fill : a, mask),
  ),
  sum: reduction(added, sumOf),
  amax: reduction(maximumOf, listed("max")),
  all: reduction((values) => Number(values.every((x) => x)), listed("all")),
  any: reduction((values) => Number(values.some((x) => x)), listed("any")),
  vector_norm: reduction(
    (values) => Math.hypot(...values),
    (values, termOf, more) => called("√", sumOf(values, (k) => squared(termOf(k)), more)),
  ),
  to: (/** @type {Computed} */ node, /** @type {ConstantNode} */ type) => (valueOf(type) === "float32" ? inFloat32(node) : node),
  double: (/** @type {Computed} */ node) => node,
  matmul, softmax, take_along_dim: takeAlong, ...rearrangements,
};

/**
 * The node of a tree, over the steps by name. Throws for a call or a name that this page does not know.
 *
 * @param {Tree} tree
 * @param {Map<string, Named>} steps
 * @returns {Computed}
 */
export function nodeOf(tree, steps) {
  if (tree.kind === "value") return /** @type {Computed} */ (valueNode(constantIn(tree), tree.text)); // or what an index takes
  if (tree.kind === "name") {
    const step = steps.get(tree.name);
    if (!step) throw new Error(`no step is called ${tree.name}`);
    return step.node;
  }
  if (!Object.hasOwn(operations, tree.name)) throw new Error(`this page has no operation ${tree.name}`);
  const inputs = tree.inputs.map((inner) => nodeOf(inner, steps));
  const options = Object.entries(tree.options).map(([name, inner]) => [name, nodeOf(inner, steps)]);
  const operation = operations[/** @type {keyof typeof operations} */ (tree.name)];
  // what Python's tree gives a call is what it takes: the explanations' tests run every one
  const run = /** @type {(...given: unknown[]) => Computed} */ (/** @type {(...given: never[]) => unknown} */ (operation));
  return run(...inputs, ...(options.length ? withGap(inputs, Object.fromEntries(options)) : []));
}

/**
 * Options follow the axis of a reduction, which may itself be one of them.
 *
 * @param {Given[]} inputs
 * @param {Record<string, Given>} options
 */
const withGap = (inputs, options) => (inputs.length > 1 ? [options] : [undefined, options]);
