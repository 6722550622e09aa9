// ---- The weights of a rectangle of pairs, pooled. Pure: it runs in the worker and, where there is none, on the page.

import { breathe, countsOf, mayLook, onlySpans, scoresOf, shownOf } from "./weights.js";

/** @import { Afar, TileRequest, Weighed } from "./types.d.ts" */

/**
 * The weights of query i on keys `from` to `to`, all inside its span; -1 where it may not look.
 *
 * @param {Weighed} head
 * @param {number} i
 * @param {number} from
 * @param {number} to
 * @param {Float64Array} into
 */
export function weightsOf(head, i, from, to, into) {
  if (head.shares) {
    into.set(head.shares.subarray(i * head.keys + from, i * head.keys + Math.max(from, to)));
    return;
  }
  const total = head.logsumexp[i];
  const plain = onlySpans(head);
  const weights = !head.times && !head.slope;
  scoresOf(head, i, from, to, into);
  for (let at = 0; at < to - from; at++) {
    into[at] = !plain && !mayLook(head, i, from + at) ? -1 : total === -Infinity ? 0 : Math.exp(into[at] - total);
    if (!weights && into[at] > 0) into[at] = shownOf(head, into[at], i, from + at);
  }
}

/**
 * Lets other work run after `most` ms. Returns true, or the promise of whether to continue.
 *
 * @param {number} most
 * @param {() => boolean} wanted
 * @returns {() => true | Promise<boolean>}
 */
export function slices(most, wanted) {
  let since = performance.now();
  return () => {
    if (performance.now() - since < most) return true;
    return breathe().then(() => {
      since = performance.now();
      return wanted();
    });
  };
}

/**
 * The promise of rows × columns numbers, of `perRow` queries by `perColumn` keys each, from query i and key j on: the
 * largest weight of the pairs, or their mean, 0 for those that are not allowed; with `relative` each weight times the
 * number of keys that its query sees. -1 where no pair is allowed, NaN where a weight is NaN; null when the numbers are no longer wanted.
 *
 * @param {Weighed} head
 * @param {TileRequest} given
 * @param {() => boolean | Promise<boolean>} pause
 * @returns {Promise<Float32Array | null>}
 */
export async function tileOf(head, { i, j, rows, columns, perRow, perColumn, mean, relative }, pause) {
  const cells = new Float32Array(rows * columns).fill(-1);
  const sums = mean ? new Float64Array(rows * columns) : null;
  const right = Math.min(head.keys, j + columns * perColumn);
  const weights = new Float64Array(Math.max(0, right - j));
  const counts = countsOf(head);
  const below = Math.min(head.queries, i + rows * perRow);
  for (let query = i; query < below; query++) {
    const from = Math.max(j, head.start[query]);
    const to = Math.min(right, head.stop[query]);
    if (from >= to) continue;
    const base = Math.floor((query - i) / perRow) * columns;
    const factor = relative ? counts[query] : 1;
    weightsOf(head, query, from, to, weights);
    for (let at = 0, key = from - j; at < to - from; at++, key++) {
      if (weights[at] < 0) continue;
      const value = weights[at] * factor;
      const cell = base + (perColumn === 1 ? key : Math.floor(key / perColumn));
      if (sums) {
        sums[cell] += value;
        cells[cell] = 0; // some pair is allowed
      } else if (!(value <= cells[cell]) && cells[cell] === cells[cell]) cells[cell] = value;
    }
    const go = pause();
    if (go !== true && !(await go)) return null;
  }
  if (!sums) return cells;
  return cells.map((none, cell) => {
    if (none < 0) return none;
    const tall = Math.min(perRow, head.queries - i - Math.floor(cell / columns) * perRow);
    return sums[cell] / (tall * Math.min(perColumn, head.keys - j - (cell % columns) * perColumn));
  });
}

/** @type {Float64Array | null} */
let codeTable = null;

/** The weight that each code of a pyramid stands for; -1 for no pair allowed. See `_blocks.py`. */
function weightsOfCodes() {
  codeTable ??= Float64Array.from({ length: 65536 }, (_, code) =>
    (code === 0 ? -1 : code === 1 ? 0 : code === 65535 ? NaN : 2 ** ((code - 2) / 128 - 48)));
  return codeTable;
}

/**
 * The same as `tileOf`, from the head's pyramid, whose cells are no larger: all cells that one of these overlaps, so
 * that no maximum is lost. `relative` takes the middle query's number of keys for all of a cell.
 *
 * @param {Afar} head
 * @param {TileRequest} given
 */
export function tileFromPyramid(head, { i, j, rows, columns, perRow, perColumn, mean, relative }) {
  const { pyramid } = head;
  if (!pyramid) throw new Error("this head has no map from afar");
  const codes = mean ? pyramid.mean : pyramid.max;
  const weights = weightsOfCodes();
  const counts = countsOf(head);
  const cells = new Float32Array(rows * columns).fill(-1);
  /**
   * @param {number} first
   * @param {number} count
   * @param {number} per
   * @param {number} length
   * @param {number} step
   * @param {number} all
   * @returns {[number, number][]}
   */
  const spans = (first, count, per, length, step, all) => Array.from({ length: count }, (_, at) => {
    const from = first + at * per;
    return [Math.floor(from / step), Math.min(all, Math.ceil(Math.min(length, from + per) / step))];
  });
  const down = spans(i, rows, perRow, head.queries, pyramid.perRow, pyramid.rows);
  const across = spans(j, columns, perColumn, head.keys, pyramid.perColumn, pyramid.columns);
  for (let row = 0; row < rows; row++) {
    const [top, bottom] = down[row];
    for (let column = 0; column < columns; column++) {
      const [left, right] = across[column];
      let value = -1;
      let sum = 0;
      for (let a = top; a < bottom; a++) {
        const middle = Math.min(head.queries - 1, Math.floor((a + 0.5) * pyramid.perRow));
        const factor = relative ? counts[middle] : 1;
        for (let b = left; b < right; b++) {
          const code = codes[a * pyramid.columns + b];
          if (code === 0) continue;
          const each = weights[code] * factor;
          sum += each;
          if (!(each <= value) && value === value) value = each;
        }
      }
      if (value !== -1) cells[row * columns + column] = mean ? sum / ((bottom - top) * (right - left)) : value;
    }
  }
  return cells;
}
