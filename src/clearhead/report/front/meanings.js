// ---- The numbers of a pair that the page can show: its weight, what is made of it, or the rollout of several layers.

import { slices, weightsOf } from "./tiles.js";

/**
 * @import { Run } from "./data.js"
 * @import { Head, HeadAt, Layer, Meaning, Numbers, Parts, Reader } from "./types.d.ts"
 */

const LONGEST = 4096; // tokens a side of numbers that have no map from afar
const MOST = 2 ** 31; // products of a rollout, some four seconds

/** @type {Meaning[]} the first is the one that the page opens with */
export const MEANINGS = [
  {
    name: "weights", title: "weights", unit: "",
    says: "The weights of each query sum to 1.",
    lacks: () => "",
  },
  {
    name: "values", title: "weights × value norms", unit: " of a mean value",
    says: "w‖v‖: how long the value is that the head moves from the key. 100% is the mean length of the head's values.",
    lacks: (run, at) => lacksPart(run, at, "valueNorms", "watch with values=True"),
  },
  {
    name: "outputs", title: "output norms", unit: " of a mean output",
    says: "w‖v W_O‖: how long the vector is that the head adds to the query for the key (Kobayashi et al. 2020). 100% is the mean of ‖v W_O‖ over the keys.",
    lacks: (run, at) => lacksPart(run, at, "transformedNorms", "watch with values=True, where the layer that writes the heads is found"),
  },
  {
    name: "raises", title: "gradients: raise the loss", unit: " of a mean query's sum",
    says: "w ∂L/∂w where it is above 0: to first order, the loss falls by it if the weight is removed. 100% is what all pairs of a query have on average, without their signs.",
    lacks: (run, at) => lacksPart(run, at, "slopes", "watch with gradients=True and call loss.backward()"),
  },
  {
    name: "lowers", title: "gradients: lower the loss", unit: " of a mean query's sum",
    says: "−w ∂L/∂w where it is above 0: to first order, the loss grows by it if the weight is removed. 100% is what all pairs of a query have on average, without their signs.",
    lacks: (run, at) => lacksPart(run, at, "slopes", "watch with gradients=True and call loss.backward()"),
  },
  {
    name: "rollout", title: "rollout up to this layer", unit: "",
    says: "The share of each input token in a token after this layer, if a layer passes on half of its input and half of what its heads attend to, on average (Abnar and Zuidema 2020). The shares of each token sum to 1.",
    lacks: (run, { layer }) => {
      const flow = flowTo(run, layer);
      if (!flow) return "needs all self-attention layers of one run, of one length, on the page";
      return productsOf(flow) > MOST ? "text too long for the page: seen.rollout()" : "";
    },
  },
];

/** @type {Reader} */
export const meaningIn = (text) => (MEANINGS.slice(1).find(({ name }) => name === text)?.name ?? null);

/**
 * What is missing for a number that is made of an array of the file; "" where nothing is.
 *
 * @param {Run} run
 * @param {HeadAt} at
 * @param {"valueNorms" | "transformedNorms" | "slopes"} name
 * @param {string} remedy
 */
function lacksPart(run, { layer, head }, name, remedy) {
  const { shared, heads, queries, keys } = run.layers[layer];
  if (({ ...shared, ...heads[head] })[name] === undefined) return remedy;
  return Math.max(queries, keys) > LONGEST ? `texts of up to ${LONGEST} tokens` : "";
}

/**
 * The layers up to this one that read each other's results; null where they are not known.
 *
 * @param {Run} run
 * @param {number} layer
 */
function flowTo(run, layer) {
  const flow = run.flows.find((one) => one.includes(layer));
  return flow ? flow.slice(0, flow.indexOf(layer) + 1).map((at) => run.layers[at]) : null;
}

/** @param {Layer[]} layers */
const productsOf = (layers) => layers.reduce((sum, { heads, keys, features }) =>
  sum + keys * keys * (heads.length * features + keys), 0);

/**
 * The meaning that is shown of a head: the chosen one, or the weights where the head lacks something for it.
 *
 * @param {Run} run
 * @param {HeadAt} at
 * @param {string | null} wanted
 */
export function meaningAt(run, at, wanted) {
  const found = MEANINGS.find(({ name }) => name === wanted);
  return found && found.lacks(run, at) === "" ? found : MEANINGS[0];
}

/** @type {WeakMap<Head, Map<string, Promise<Head>>>} */
const made = new WeakMap();

/**
 * The promise of a head whose numbers have this meaning: `weightOf` and `weightsOf` give them in the place of weights.
 *
 * @param {Run} run
 * @param {HeadAt} at
 * @param {string | null} wanted
 */
export async function openUnder(run, at, wanted) {
  const head = await run.open(at.layer, at.head);
  const { name } = meaningAt(run, at, wanted);
  if (name === MEANINGS[0].name) return head;
  const known = made.get(head) ?? new Map();
  made.set(head, known);
  if (!known.has(name)) known.set(name, make(run, at, head, name));
  return /** @type {Promise<Head>} */ (known.get(name));
}

/**
 * @param {Run} run
 * @param {HeadAt} at
 * @param {Head} plain
 * @param {string} name
 * @returns {Promise<Head>}
 */
async function make(run, at, plain, name) {
  const head = { ...plain, plain, pyramid: null, ratios: undefined, strongest: undefined, evenness: undefined, entropy: null };
  const { parts } = plain;
  if (name === "rollout") return Object.assign(head, await rolledHead(run, at.layer));
  if (name === "values" || name === "outputs") {
    const times = byMean((name === "values" ? plain.valueNorms : plain.transformedNorms) ?? new Float32Array(plain.keys));
    return Object.assign(head, { times, received: times.map((factor, j) => factor * plain.received[j]) });
  }
  const slope = await slopeOf(run, parts, plain, name === "lowers" ? -1 : 1);
  return Object.assign(head, slope);
}

/**
 * Lengths as multiples of their mean.
 *
 * @param {Numbers} lengths
 */
function byMean(lengths) {
  const mean = Array.from(lengths).reduce((sum, one) => sum + one, 0) / lengths.length;
  return Float64Array.from(lengths, (one) => (mean > 0 ? one / mean : 0));
}

/**
 * What `weights.js` reads of the gradient of the output, and what each key receives.
 *
 * @param {Run} run
 * @param {Parts} parts
 * @param {Head} head
 * @param {1 | -1} sign
 */
async function slopeOf(run, { slopes }, head, sign) {
  if (!slopes) throw new Error("no gradient was kept");
  const [grad, value, raises, lowers] = [
    await run.joined(slopes.grad), await run.joined(slopes.value), await run.array(slopes.raises), await run.array(slopes.lowers),
  ];
  if (!grad || !value) throw new Error("the gradient is missing");
  const seeing = Array.from(head.counts).filter((count) => count > 0).length;
  const all = Array.from(raises).reduce((sum, one, j) => sum + one + lowers[j], 0);
  const factor = all > 0 ? (sign * seeing) / all : 0;
  const own = sign > 0 ? raises : lowers;
  return {
    slope: { grad, value, features: slopes.features, factor },
    received: Float64Array.from(own, (one) => one * Math.abs(factor)),
  };
}

/** @type {WeakMap<Run, Map<number, Promise<Float32Array>>>} the rollouts up to layers, (tokens, tokens) */
const rolled = new WeakMap();

/**
 * The promise of the rollout up to a layer: R = Ã R', Ã = (Ā + I) / (1 + the sum of each row of Ā), Ā the mean over the heads.
 *
 * @param {Run} run
 * @param {number} layer
 * @returns {Promise<Float32Array>}
 */
function rolloutTo(run, layer) {
  const known = rolled.get(run) ?? new Map();
  rolled.set(run, known);
  if (!known.has(layer)) known.set(layer, roll(run, layer));
  return /** @type {Promise<Float32Array>} */ (known.get(layer));
}

/**
 * @param {Run} run
 * @param {number} layer
 */
async function roll(run, layer) {
  const flow = run.flows.find((one) => one.includes(layer)) ?? [];
  const at = flow.indexOf(layer);
  const before = at > 0 ? await rolloutTo(run, flow[at - 1]) : null;
  const { keys: length, heads } = run.layers[layer];
  const read = [];
  for (const head of heads.keys()) read.push(await run.open(layer, head));
  const found = new Float32Array(length * length);
  const [mean, row, into] = [new Float64Array(length), new Float64Array(length), new Float64Array(length)];
  const pause = slices(12, () => true);
  for (let i = 0; i < length; i++) {
    mean.fill(0);
    for (const head of read) {
      const [from, to] = [head.start[i], head.stop[i]];
      weightsOf(head, i, from, to, row);
      for (let j = from; j < to; j++) mean[j] += Math.max(0, row[j - from]) / read.length;
    }
    const total = mean.reduce((sum, one) => sum + one, 0);
    mean[i] += 1;
    into.fill(0);
    for (let k = 0; k < length; k++) {
      const share = mean[k] / (1 + total);
      if (share === 0) continue;
      if (!before) into[k] += share;
      else for (let j = 0; j < length; j++) into[j] += share * before[k * length + j];
    }
    found.set(into, i * length);
    await pause();
  }
  return found;
}

/**
 * A head of which the numbers are those of a rollout; a query sees what reaches it.
 *
 * @param {Run} run
 * @param {number} layer
 */
async function rolledHead(run, layer) {
  const shares = await rolloutTo(run, layer);
  const { keys: length } = run.layers[layer];
  const [start, stop, counts] = [0, 1, 2].map(() => new Int32Array(length));
  const received = new Float64Array(length);
  for (let i = 0; i < length; i++) {
    start[i] = length;
    for (let j = 0; j < length; j++) {
      const share = shares[i * length + j];
      received[j] += share;
      if (share === 0) continue;
      start[i] = Math.min(start[i], j);
      stop[i] = j + 1;
    }
    counts[i] = stop[i] - start[i];
  }
  return {
    shares, start, stop, counts, received, holes: null, relative: null, dense: null, tiles: null, expected: null, sink: null,
    distance: null, mostKeys: undefined, alike: undefined,
  };
}
