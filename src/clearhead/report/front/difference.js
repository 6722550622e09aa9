// ---- The divergence of two rows of weights. The formulas of `compare` in Python, in float64.

import { lastOf } from "../../base/front/numbers.js";
import { breathe, mayLook, weightOf } from "./weights.js";
import { plural } from "./words.js";

/** @import { ApartPair, Difference, Frame, Head, Heads, Layer, Side } from "./types.d.ts" */

const MOST_PAIRS = 2 ** 22; // the most pairs that are computed: of longer texts every second, third, … query is compared
const ROUNDING = 0.001; // the most by which a row without a sink may be below 1
const LARGEST = 12; // how many differences are listed

/**
 * JS(p, q) = ½ Σ_j (p_j log p_j/m_j + q_j log q_j/m_j), m = (p + q) / 2, in nats: 0 to log 2. The
 * weight that p and q lack to 1 counts as one more key: the share of a sink, where there is one (`rest`), and of padding.
 * p/m is computed as 1 + (p − q)/(p + q), so that nearly equal weights keep their digits, and as 2p/(p + q) where one
 * weight is far below the other, so that it keeps its own.
 *
 * @param {Float64Array} p
 * @param {Float64Array} q
 * @param {boolean} rest
 */
function jensenShannon(p, q, rest) {
  /**
   * @param {number} weight
   * @param {number} total
   * @param {number} apart
   */
  const part = (weight, total, apart) => (weight === 0 ? 0
    : weight * (apart < -0.5 ? Math.log((2 * weight) / total) : Math.log1p(apart)));
  let sum = 0;
  const left = [1, 1];
  /**
   * @param {number} a
   * @param {number} b
   */
  const add = (a, b) => {
    const total = a + b;
    if (total === 0) return;
    const apart = (a - b) / total;
    sum += part(a, total, apart) + part(b, total, -apart);
  };
  for (let j = 0; j < p.length; j++) {
    add(p[j], q[j]);
    left[0] -= p[j];
    left[1] -= q[j];
  }
  if (rest || Math.max(...left) > ROUNDING) add(Math.max(0, left[0]), Math.max(0, left[1]));
  return Math.max(0, sum / 2);
}

/**
 * The places of the tokens of one text in another, −1 for a token that the other lacks; null where all places are equal.
 *
 * @param {Heads} run
 * @param {number} from
 * @param {number} to
 */
export function placesAcross(run, from, to) {
  for (const { texts, positions } of run.aligned ?? []) {
    const way = texts[0] === from && texts[1] === to ? 0 : texts[1] === from && texts[0] === to ? 1 : -1;
    if (way < 0) continue;
    const places = new Int32Array(run.texts?.[from].length ?? 0).fill(-1);
    const [here, there] = way === 0 ? positions : [positions[1], positions[0]];
    here.forEach((place, at) => { places[place] = there[at]; });
    return places;
  }
  return null;
}

/**
 * The tokens of two texts as one text, those that correspond once: for each the place in the first and in the second text,
 * −1 where a text lacks it. Null where all places are equal.
 *
 * @param {Heads} run
 * @param {number} first
 * @param {number} second
 * @returns {[Int32Array, Int32Array] | null}
 */
function joinedTexts(run, first, second) {
  const across = placesAcross(run, first, second);
  if (!across) return null;
  /** @type {[number, number][]} */
  const found = [];
  let next = 0;
  across.forEach((other, own) => {
    for (; next < other; next++) found.push([-1, next]);
    next = Math.max(next, other + 1);
    found.push([own, other]);
  });
  for (const end = run.texts?.[second].length ?? 0; next < end; next++) found.push([-1, next]);
  return [Int32Array.from(found, ([own]) => own), Int32Array.from(found, ([, other]) => other)];
}

/**
 * The texts of a head and, where one of the others reads other texts that correspond, these with them as one.
 *
 * @param {Heads} run
 * @param {Head[]} heads
 * @returns {Frame}
 */
export function frameOf(run, [head, ...others]) {
  /** @param {Head} other */
  const differs = ({ layer }) => layer.queryText !== head.layer.queryText || layer.keyText !== head.layer.keyText;
  const second = others.find(differs)?.layer ?? head.layer;
  const [rows, columns] = /** @type {const} */ (["queryText", "keyText"]).map((text) => joinedTexts(run, head.layer[text], second[text]));
  return {
    queries: rows?.[0].length ?? head.queries, keys: columns?.[0].length ?? head.keys, layers: [head.layer, second],
    rows: rows ?? [null, null], columns: columns ?? [null, null],
  };
}

/**
 * The places of a frame's queries and keys in the texts of a layer.
 *
 * @param {Frame} frame
 * @param {Layer} layer
 */
export function placesOf({ layers: [first], rows, columns }, layer) {
  const [row, column] = [layer.queryText === first.queryText ? 0 : 1, layer.keyText === first.keyText ? 0 : 1];
  return { rows: rows[row], columns: columns[column] };
}

/**
 * @param {Int32Array | null | undefined} places
 * @param {number} at
 */
export const inText = (places, at) => (places ? places[at] : at);

/**
 * The weight of a pair in a head, by the pair's place in the texts that are compared.
 *
 * @param {Head} head
 * @param {number} i
 * @param {number} j
 */
export const weightBeside = (head, i, j) => weightOf(head, inText(head.rows, i), inText(head.columns, j));

/**
 * Whether a query may see a key, by their places in the texts that are compared.
 *
 * @param {Head} head
 * @param {number} i
 * @param {number} j
 */
export const mayBeside = (head, i, j) => mayLook(head, inText(head.rows, i), inText(head.columns, j));

/**
 * The reason why two sides cannot be compared, or null. A side is the mean of its `heads`, each with its places in the
 * texts that are compared (`placesOf`); the side `uniform` has no heads.
 *
 * @param {Side} a
 * @param {Side} b
 */
export function objectionTo(a, b) {
  const heads = [...a.heads, ...b.heads];
  if (!heads.length) return "Choose a head for one side: there is none.";
  const other = heads.find(({ queries, keys, rows, columns }) => (
    (!rows && queries !== heads[0].queries) || (!columns && keys !== heads[0].keys)));
  if (other === undefined) return null;
  /** @param {Head} given */
  const size = ({ queries, keys }) => `${plural(queries, "query")} on ${plural(keys, "key")}`;
  return `They cannot be compared pair by pair: one has ${size(heads[0])}, another ${size(other)}.`;
}

/**
 * The weights of a side's query, float64, where every head may look at the keys of `seen`.
 *
 * @param {Side} side
 * @param {number} i
 * @param {Uint8Array} seen
 */
function rowOf(side, i, seen) {
  const row = new Float64Array(seen.length);
  let count = 0;
  for (let j = 0; j < seen.length; j++) count += seen[j];
  for (let j = 0; j < seen.length; j++) {
    if (!seen[j]) continue;
    if (!side.heads.length) row[j] = 1 / count;
    for (const head of side.heads) row[j] += weightBeside(head, i, j) / side.heads.length;
  }
  return row;
}

/**
 * Whether all texts have query i. `haveKey`: whether all have key j.
 *
 * @param {Head[]} heads
 * @param {number} i
 */
export const haveQuery = (heads, i) => heads.every(({ rows }) => inText(rows, i) >= 0);

/**
 * @param {Head[]} heads
 * @param {number} j
 */
export const haveKey = (heads, j) => heads.every(({ columns }) => inText(columns, j) >= 0);

/**
 * The keys, of those that all texts have, that query i may see, as 0 or 1; null where it sees none, or the masks of the
 * heads differ.
 *
 * @param {Head[]} heads
 * @param {number} i
 * @param {number} keys
 */
function seenBy(heads, i, keys) {
  const seen = new Uint8Array(keys);
  let some = false;
  for (let j = 0; j < keys; j++) {
    if (!haveKey(heads, j)) continue;
    const may = mayBeside(heads[0], i, j);
    if (heads.some((head) => mayBeside(head, i, j) !== may)) return null;
    seen[j] = Number(may);
    some ||= may;
  }
  return some ? seen : null;
}

/**
 * A − B: `pool`, in cells of `perRow` × `perColumn` pairs, the difference with the largest size, NaN where nothing is
 * compared; `limit`, the largest of all; `byQuery`, the divergence of each query, NaN for those left out, and its `mean`;
 * `byKey`, sums of the differences; `largest`, the pairs that differ most: {i, j, a, b}. In slices; null when `wanted()`
 * turns false.
 *
 * @param {Side} a
 * @param {Side} b
 * @param {Frame} frame
 * @param {number} perRow
 * @param {number} perColumn
 * @param {() => boolean} wanted
 * @returns {Promise<Difference | null>}
 */
export async function differenceOf(a, b, { queries, keys, rows }, perRow, perColumn, wanted) {
  const heads = [...a.heads, ...b.heads];
  const step = Math.ceil((queries * keys * heads.length) / 2 / MOST_PAIRS);
  const columns = Math.ceil(keys / perColumn);
  const pool = new Float32Array(Math.ceil(queries / perRow) * columns).fill(NaN);
  const byQuery = new Float64Array(queries).fill(NaN);
  const byKey = new Float64Array(keys);
  const rest = heads.some(({ sink, rows }) => rows || (sink !== null && sink !== undefined));
  /** @type {ApartPair[]} */
  let largest = [];
  let least = 0; // the smallest of the listed differences
  let leftOut = 0;
  /** @type {[number, number]} the numbers of queries that only the first text has, or only the second */
  const alone = [0, 0];
  let since = performance.now();
  for (let i = 0; i < queries; i += step) {
    if (!haveQuery(heads, i)) {
      alone[inText(rows[0], i) < 0 ? 1 : 0]++;
      continue;
    }
    const seen = seenBy(heads, i, keys);
    if (seen === null) {
      leftOut++;
      continue;
    }
    const [p, q] = [a, b].map((side) => rowOf(side, i, seen));
    byQuery[i] = jensenShannon(p, q, rest);
    for (let j = 0; j < keys; j++) {
      if (!seen[j]) continue;
      const apart = p[j] - q[j];
      byKey[j] += apart;
      const cell = Math.floor(i / perRow) * columns + Math.floor(j / perColumn);
      if (!(Math.abs(apart) <= Math.abs(pool[cell]))) pool[cell] = apart;
      if (Math.abs(apart) <= least) continue;
      largest.push({ i, j, a: p[j], b: q[j] });
      if (largest.length < 20 * LARGEST) continue;
      largest = strongest(largest);
      least = Math.abs(lastOf(largest).a - lastOf(largest).b);
    }
    if (performance.now() - since < 30) continue;
    await breathe();
    if (!wanted()) return null;
    since = performance.now();
  }
  const known = byQuery.filter((value) => value === value);
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  largest = strongest(largest);
  const limit = largest.length ? Math.abs(largest[0].a - largest[0].b) : 1;
  return { pool, limit, byQuery, byKey, mean, compared: known.length, leftOut, alone, step, largest };
}

/** @param {ApartPair[]} pairs */
const strongest = (pairs) =>
  pairs.sort((one, two) => Math.abs(two.a - two.b) - Math.abs(one.a - one.b)).slice(0, LARGEST);
