// ---- Operations that only move numbers: each entry of the result is one of the input's, under another index.
//
// Nodes are those of operations.js.

import { number, placeOf, sizeOf } from "./numbers.js";
import { leaf } from "./terms.js";

/** @import { Computed, Constant, ConstantNode, Extent, Given, Range } from "./types.d.ts" */

/**
 * The value of a constant in a tree.
 *
 * @param {ConstantNode} node
 */
export const valueOf = (node) => node.at([]);

/**
 * A number of a tree, such as an axis.
 *
 * @param {ConstantNode | undefined} node
 */
export function constantOf(node) {
  const value = node && valueOf(node);
  if (typeof value !== "number") throw new Error("this page needs a number there");
  return value;
}

/**
 * @param {{ axes: Extent[] }} node
 * @param {number} axis
 */
export const axisOf = (node, axis) => (axis < 0 ? axis + node.axes.length : axis);

/**
 * @template {Constant} Value
 * @param {Value} value
 * @param {string | null} [text]
 */
export const valueNode = (value, text = null) => ({
  axes: [],
  at: () => value,
  term: () => leaf(text ?? number(Number(value))),
});

/**
 * The same numbers under other indices.
 *
 * @param {Computed} node
 * @param {Extent[]} axes
 * @param {(index: number[]) => number[]} indexOf
 * @returns {Computed}
 */
const moved = (node, axes, indexOf) => ({
  axes,
  at: (index) => node.at(indexOf(index)),
  term: (index) => node.term(indexOf(index)),
});

/**
 * @param {Computed} node
 * @param {ConstantNode} first
 * @param {ConstantNode} second
 * @returns {Computed}
 */
function transpose(node, first, second) {
  const [a, b] = [first, second].map((axis) => axisOf(node, constantOf(axis)));
  /**
   * @template Entry
   * @param {Entry[]} list
   */
  const swap = (list) => list.map((x, n) => (n === a ? list[b] : n === b ? list[a] : x));
  return moved(node, swap(node.axes), swap);
}

/**
 * @param {Computed} node
 * @param {ConstantNode} where
 * @returns {Computed}
 */
function unsqueeze(node, where) {
  const axis = constantOf(where) < 0 ? constantOf(where) + node.axes.length + 1 : constantOf(where);
  const axes = [...node.axes.slice(0, axis), { n: 1, more: 0 }, ...node.axes.slice(axis)];
  return moved(node, axes, (index) => index.filter((_, n) => n !== axis));
}

/**
 * @param {Computed} node
 * @returns {Computed}
 */
const swapLast = (node) => transpose(node, valueNode(-2), valueNode(-1));

/**
 * How many entries an axis has. It raises an error for an axis that this page holds in part.
 *
 * @param {Extent} given
 */
export function lengthOf({ n, more }) {
  if (more) throw new Error("this page holds a part of the entries alone");
  return n;
}

/**
 * @param {number} n
 * @returns {Extent}
 */
const axisOfSize = (n) => ({ n, more: 0 });

/**
 * @param {Computed} node
 * @param {ConstantNode} where
 * @param {ConstantNode[]} parts
 * @returns {Computed}
 */
function unflatten(node, where, parts) {
  const axis = axisOf(node, constantOf(where));
  const sizes = parts.map(constantOf);
  const inner = sizes.length;
  if (sizeOf(sizes) !== lengthOf(node.axes[axis])) throw new Error("sizes do not multiply to that of the axis");
  const axes = [...node.axes.slice(0, axis), ...sizes.map(axisOfSize), ...node.axes.slice(axis + 1)];
  return moved(node, axes, (index) =>
    [...index.slice(0, axis), placeOf(index.slice(axis, axis + inner), sizes), ...index.slice(axis + inner)]);
}

/**
 * The axes from this one to the last as one.
 *
 * @param {Computed} node
 * @param {ConstantNode} where
 * @returns {Computed}
 */
function flatten(node, where) {
  const axis = axisOf(node, constantOf(where));
  const sizes = node.axes.slice(axis).map(lengthOf);
  return moved(node, [...node.axes.slice(0, axis), axisOfSize(sizeOf(sizes))], (index) => {
    let place = index[axis];
    const inner = sizes.map(() => 0);
    for (let n = sizes.length - 1; n >= 0; n--) {
      inner[n] = place % sizes[n];
      place = Math.floor(place / sizes[n]);
    }
    return [...index.slice(0, axis), ...inner];
  });
}

/** @typedef {number | "..." | number[] | Range} Place an entry of an index */

/**
 * @param {Constant} value
 * @returns {Place}
 */
function placeIn(value) {
  if (typeof value !== "string" || value === "...") return value;
  throw new Error("this page does not know that index");
}

/**
 * `node[...]`: "..." stands for the axes that are not named, a number drops its axis, a list takes these entries.
 *
 * @param {Computed} node
 * @param {...ConstantNode} entries
 * @returns {Computed}
 */
function indexed(node, ...entries) {
  const places = entries.map((entry) => placeIn(valueOf(entry)));
  const gap = places.indexOf("...");
  /** @type {Range[]} */
  const every = Array.from({ length: node.axes.length - places.length + (gap >= 0 ? 1 : 0) }, () => ({}));
  const all = (gap < 0 ? [...places, ...every] : [...places.slice(0, gap), ...every, ...places.slice(gap + 1)])
    .filter((place) => place !== "...");
  const axes = all.flatMap((place, axis) => {
    if (typeof place === "number") return [];
    if (Array.isArray(place)) return [axisOfSize(place.length)];
    const { from = 0, to, by = 1 } = place;
    if (from === 0 && to === undefined && by === 1) return [node.axes[axis]];
    return [axisOfSize(Math.ceil((Math.min(to ?? Infinity, lengthOf(node.axes[axis])) - from) / by))];
  });
  return moved(node, axes, (given) => {
    let n = 0;
    return all.map((place) => {
      if (typeof place === "number") return place;
      return Array.isArray(place) ? place[given[n++]] : (place.from ?? 0) + given[n++] * (place.by ?? 1);
    });
  });
}

/**
 * Nodes side by side along their axis `where`.
 *
 * @param {Computed[]} nodes
 * @param {ConstantNode} where
 * @returns {Computed}
 */
function cat(nodes, where) {
  const axis = axisOf(nodes[0], constantOf(where));
  const lengths = nodes.map((node) => lengthOf(node.axes[axis]));
  /**
   * @param {number[]} given
   * @returns {[Computed, number[]]}
   */
  const from = (given) => {
    let [n, place] = [0, given[axis]];
    while (place >= lengths[n]) place -= lengths[n++];
    return [nodes[n], given.map((x, a) => (a === axis ? place : x))];
  };
  const axes = nodes[0].axes.map((one, a) => (a === axis ? axisOfSize(lengths.reduce((sum, n) => sum + n)) : one));
  return {
    axes,
    at: (given) => { const [node, inner] = from(given); return node.at(inner); },
    term: (given) => { const [node, inner] = from(given); return node.term(inner); },
  };
}

/**
 * @param {Computed[]} nodes
 * @param {ConstantNode} where
 * @returns {Computed}
 */
const stack = (nodes, where) => cat(nodes.map((node) => unsqueeze(node, where)), where);

/**
 * Zeros after the last entry of the last axis.
 *
 * @param {Computed} node
 * @param {[ConstantNode, ConstantNode]} given
 * @returns {Computed}
 */
function pad(node, [before, after]) {
  if (constantOf(before)) throw new Error("this page pads at the end alone");
  const zeros = { axes: [...node.axes.slice(0, -1), axisOfSize(constantOf(after))], at: () => 0, term: () => leaf("0") };
  return cat([node, zeros], valueNode(-1));
}

/**
 * Of a vector: all of it `times` times, or each entry.
 *
 * @param {Computed} node
 * @param {ConstantNode} times
 * @returns {Computed}
 */
const repeat = (node, times) => cat(Array.from({ length: constantOf(times) }, () => node), valueNode(-1));

/**
 * @param {Computed} node
 * @param {ConstantNode} times
 * @returns {Computed}
 */
const repeatEach = (node, times) =>
  flatten(stack(Array.from({ length: constantOf(times) }, () => node), valueNode(-1)), valueNode(-2));

/**
 * @param {ConstantNode} from
 * @param {ConstantNode} to
 * @param {ConstantNode} by
 * @returns {Computed}
 */
function arange(from, to, by) {
  const [first, end, step] = [from, to, by].map(constantOf);
  /** @param {number[]} given */
  const at = ([n]) => first + n * step;
  return { axes: [axisOfSize(Math.ceil((end - first) / step))], at, term: (given) => leaf(String(at(given))) };
}

export const rearrangements = {
  transpose, unsqueeze, unflatten, flatten, index: indexed, cat, stack, repeat, repeat_interleave: repeatEach, arange,
  pad, T: swapLast, mT: swapLast, list: (/** @type {Given[]} */ ...nodes) => nodes,
};
