// ---- The formula. Numbers are float64 here, as in NumPy; only colours are rounded further.

/** @import { Direction, Head, Look, Scored, Tiles, Weighed } from "./types.d.ts" */

/** The function φ of a feature of a query and one of a key, by its name in scores/pair_functions.py. */
export const PHIS = {
  /**
   * @param {number} a
   * @param {number} b
   */
  mul: (a, b) => a * b,
  /**
   * @param {number} a
   * @param {number} b
   */
  tanh_add: (a, b) => Math.tanh(a + b),
  /**
   * @param {number} a
   * @param {number} b
   */
  sq_diff: (a, b) => (a - b) * (a - b),
};

/**
 * The term of feature d in the product of query i and key j. Every score is a sum of such terms.
 *
 * @param {Scored} head
 * @param {number} i
 * @param {number} j
 * @param {number} d
 */
export function term(head, i, j, d) {
  const { features, weight, phi } = head;
  if (!phi) throw new Error("this score is no sum of terms");
  const value = PHIS[phi](head.query[i * features + d], head.key[j * features + d]);
  return weight ? weight[d] * value : value;
}

/**
 * Whether the score, before its scale, is a plain product of query and key.
 *
 * @param {Scored} head
 */
const isProduct = (head) => !head.scores && !head.weight && head.phi === "mul";

/**
 * The sum of the terms; for a score without terms, the given score.
 *
 * @param {Scored} head
 * @param {number} i
 * @param {number} j
 */
export function dot(head, i, j) {
  const { features } = head;
  if (head.scores) return head.scores[i * head.keys + j];
  let sum = 0;
  if (isProduct(head)) { // the same terms without a function call for each: a page spends most of its time here
    const { query, key } = head;
    for (let f = 0, a = i * features, b = j * features; f < features; f++) sum += query[a + f] * key[b + f];
  } else for (let d = 0; d < features; d++) sum += term(head, i, j, d);
  return sum;
}

/**
 * The entry of tiles that holds pair (i, j), or -1 where its tile is not kept, since it is zeros.
 *
 * @param {Tiles} tiles
 * @param {number} i
 * @param {number} j
 */
function placeIn(tiles, i, j) {
  const { side } = tiles;
  const tile = tiles.places[Math.floor(i / side) * tiles.across + Math.floor(j / side)];
  return tile < 0 ? -1 : (tile * side + (i % side)) * side + (j % side);
}

/**
 * The bias of a pair, which is added after the softcap; −∞ hides the pair.
 *
 * @param {Scored} head
 * @param {number} i
 * @param {number} j
 */
export function biasOf(head, i, j) {
  let bias = 0;
  if (head.relative) bias += head.relative[j - i + head.queries - 1];
  if (head.dense) {
    const { values, rows, columns } = head.dense;
    bias += values[(rows === 1 ? 0 : i * columns) + (columns === 1 ? 0 : j)];
  }
  if (head.tiles) {
    const place = placeIn(head.tiles, i, j);
    if (place >= 0) bias += head.tiles.values[place];
  }
  return bias;
}

/** @param {Scored} head */
const hasBias = (head) => Boolean(head.relative || head.dense || head.tiles);

/**
 * The score of a pair from its product: scaled, then capped, then with its bias.
 *
 * @param {Scored} head
 * @param {number} product
 * @param {number} i
 * @param {number} j
 */
function scoreFrom(head, product, i, j) {
  let score = product * head.scale;
  if (head.softcap !== null) score = head.softcap * Math.tanh(score / head.softcap);
  return hasBias(head) ? score + biasOf(head, i, j) : score;
}

/**
 * @param {Scored} head
 * @param {number} i
 * @param {number} j
 */
export const scoreOf = (head, i, j) => scoreFrom(head, dot(head, i, j), i, j);

/**
 * Whether query i may see key j: it is inside the query's span, and in no hole.
 *
 * @param {Scored} head
 * @param {number} i
 * @param {number} j
 */
export function mayLook(head, i, j) {
  if (j < head.start[i] || j >= head.stop[i]) return false;
  if (head.holes) {
    const place = placeIn(head.holes, i, j);
    if (place >= 0 && (head.holes.values[place >> 3] >> (7 - (place & 7))) & 1) return false;
  }
  return !hasBias(head) || biasOf(head, i, j) !== -Infinity;
}

/**
 * Whether the spans alone are the whole mask.
 *
 * @param {Scored} head
 */
export const onlySpans = (head) => !head.holes && !hasBias(head);

/**
 * The number that is shown of a pair, from its weight: the weight, unless the head has another meaning (`meanings.js`).
 *
 * @param {Weighed} head
 * @param {number} weight
 * @param {number} i
 * @param {number} j
 */
export function shownOf({ times, slope }, weight, i, j) {
  if (times) return weight * times[j];
  if (!slope) return weight;
  const { grad, value, features, factor } = slope;
  let product = 0;
  for (let f = 0, a = i * features, b = j * features; f < features; f++) product += grad[a + f] * value[b + f];
  return Math.max(0, factor * weight * product);
}

/**
 * @param {Weighed} head
 * @param {number} i
 * @param {number} j
 */
export function weightOf(head, i, j) {
  if (head.shares) return head.shares[i * head.keys + j];
  const total = head.logsumexp[i];
  return total === -Infinity || !mayLook(head, i, j) ? 0 : shownOf(head, Math.exp(scoreOf(head, i, j) - total), i, j);
}

/**
 * The products of query i with keys `from` to `to`, four at a time, since their sums do not depend on each other.
 *
 * @param {Scored} head
 * @param {number} i
 * @param {number} from
 * @param {number} to
 * @param {Float64Array} into
 */
function productsOf(head, i, from, to, into) {
  const { query, key, features } = head;
  const first = i * features;
  let j = from;
  for (; j + 4 <= to; j += 4) {
    let a = j * features;
    let b = a + features;
    let c = b + features;
    let d = c + features;
    let sumA = 0;
    let sumB = 0;
    let sumC = 0;
    let sumD = 0;
    for (let f = first; f < first + features; f++) {
      const value = query[f];
      sumA += value * key[a++];
      sumB += value * key[b++];
      sumC += value * key[c++];
      sumD += value * key[d++];
    }
    const at = j - from;
    into[at] = sumA;
    into[at + 1] = sumB;
    into[at + 2] = sumC;
    into[at + 3] = sumD;
  }
  for (; j < to; j++) into[j - from] = dot(head, i, j);
}

/**
 * The scores of query i on keys `from` to `to`, whether it may look at them or not.
 *
 * @param {Scored} head
 * @param {number} i
 * @param {number} from
 * @param {number} to
 * @param {Float64Array} into
 */
export function scoresOf(head, i, from, to, into) {
  const product = isProduct(head);
  if (product) productsOf(head, i, from, to, into);
  for (let j = from; j < to; j++) into[j - from] = scoreFrom(head, product ? into[j - from] : dot(head, i, j), i, j);
}

/**
 * The share of a query's softmax that goes to its head's sink; 0 without one, and where it sees nothing.
 *
 * @param {Pick<Weighed, "sink" | "logsumexp">} head
 * @param {number} i
 */
export function sinkShareOf(head, i) {
  return head.sink === null || head.logsumexp[i] === -Infinity ? 0 : Math.exp(head.sink - head.logsumexp[i]);
}

/**
 * Of all rows: `logsumexp` of keys and sink; `entropy`, and `distance` in positions, of the weights divided by their sum;
 * `received`, the sum of these over the queries. The page computes them where the head is small.
 *
 * @param {Scored & Pick<Head, "sink"> & Pick<Head, "kind" | "position">} head
 */
export function rowsOf(head) {
  const { queries, keys, sink } = head;
  const placed = head.position !== null && head.kind === "self";
  const logsumexp = new Float64Array(queries).fill(-Infinity);
  const entropy = new Float64Array(queries);
  const received = new Float64Array(keys);
  const distance = placed ? new Float64Array(queries) : null;
  const scores = new Float64Array(keys);
  const plain = onlySpans(head);
  for (let i = 0; i < queries; i++) {
    const [from, to] = [head.start[i], head.stop[i]];
    scoresOf(head, i, from, to, scores);
    let most = -Infinity;
    for (let j = from; j < to; j++) {
      if (!plain && !mayLook(head, i, j)) scores[j - from] = -Infinity;
      if (!(scores[j - from] <= most) && most === most) most = scores[j - from]; // NaN too, and then it stays
    }
    if (most === -Infinity) continue;
    let sum = 0;
    for (let at = 0; at < to - from; at++) sum += Math.exp(scores[at] - most);
    const own = most + Math.log(sum);
    for (let j = from; j < to; j++) {
      const score = scores[j - from];
      if (score === -Infinity) continue;
      const weight = Math.exp(score - own);
      received[j] += weight;
      entropy[i] += weight * (own - score);
      if (distance) distance[i] += weight * Math.abs(i + (head.position ?? 0) - j);
    }
    logsumexp[i] = sink === null ? own
      : Math.max(own, sink) + Math.log1p(Math.exp(-Math.abs(own - sink)));
  }
  return { logsumexp, entropy, received, distance };
}

/**
 * The number of keys that each query may see; the largest, and whether it is the same for all that see something.
 *
 * @param {Pick<Weighed, "counts" | "mostKeys" | "alike">} head
 */
export function countsOf(head) {
  if (head.mostKeys === undefined) {
    const counts = Array.from(head.counts);
    const most = counts.reduce((found, count) => Math.max(found, count), 1);
    head.mostKeys = most;
    head.alike = counts.every((count) => count === 0 || count === most);
  }
  return head.counts;
}

/**
 * The most keys that a query may see.
 *
 * @param {Pick<Weighed, "counts" | "mostKeys" | "alike">} head
 */
export function mostKeysOf(head) {
  countsOf(head);
  return head.mostKeys ?? 1;
}

/**
 * The weight that query i would give each key that it may see under uniform attention.
 *
 * @param {Weighed} head
 * @param {number} i
 */
export const equalShare = (head, i) => 1 / countsOf(head)[i];

/**
 * All weights of one token: of a query on the keys (view "out"), or of the queries on a key ("in").
 * `allowed` lists the others that may be looked at, `ranked` the same, strongest first: sorted when it is asked for.
 *
 * @param {Head} head
 * @param {Direction} view
 * @param {number} token
 * @returns {Look}
 */
export function lookOf(head, view, token) {
  const out = view === "out";
  const length = out ? head.keys : head.queries;
  const weights = new Float64Array(length);
  /** @type {number[]} */
  const allowed = [];
  let sum = 0;
  for (let other = 0; other < length; other++) {
    const [i, j] = out ? [token, other] : [other, token];
    if (!mayLook(head, i, j)) continue;
    weights[other] = weightOf(head, i, j);
    sum += weights[other];
    allowed.push(other);
  }
  let ranked = null;
  return {
    head, view, token, weights, allowed, sum,
    get ranked() {
      ranked ??= allowed.slice().sort((a, b) => weights[b] - weights[a] || a - b);
      return ranked;
    },
  };
}

/**
 * The entropy of a query's weights in nats; of those divided by their sum, where a sink takes a share.
 *
 * @param {Look} look
 */
export function entropyOf(look) {
  if (look.sum === 0) return look.head.entropy?.[look.token] ?? 0; // the sink takes all of the softmax, up to rounding
  const shares = look.ranked.map((other) => look.weights[other] / look.sum);
  return shares.reduce((sum, share) => (share > 0 ? sum - share * Math.log(share) : sum + 0 * share), 0);
}

/**
 * The rank of `other` among the allowed: 1 is the strongest, equals share the better rank.
 *
 * @param {Pick<Look, "weights" | "allowed">} look
 * @param {number} other
 */
export function rankOf(look, other) {
  const weight = look.weights[other];
  return 1 + look.allowed.reduce((above, each) => above + (look.weights[each] > weight ? 1 : 0), 0);
}

/** Waits, so that input and painting can be done. */
export const breathe = () => new Promise((resolve) => { setTimeout(resolve, 0); });
