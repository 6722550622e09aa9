// ---- What layers and heads are called, and which of them stand beside each other.

/** @import { HeadAt, Heads, LayerOfHeads, PageOfHeads } from "./types.d.ts" */

/**
 * A short name for each layer, no two alike: "L3".
 *
 * @param {LayerOfHeads[]} layers
 */
export function labelsOf(layers) {
  const plain = layers.map((layer, index) => layer.label ?? `L${index}`);
  const named = plain.map((label, index) => (
    plain.indexOf(label) === plain.lastIndexOf(label) ? label : `${roleOf(layers[index])} ${label}`));
  return named.map((label, index) => {
    const same = named.slice(0, index).filter((other) => other === label).length;
    return same ? `${label}#${same + 1}` : label;
  });
}

/**
 * What a layer reads and is read by: "encoder", "decoder", "cross", "self".
 *
 * @param {LayerOfHeads} layer
 */
export const roleOf = (layer) => layer.role ?? layer.kind;

/**
 * Whether a layer is of the second of two recordings, and the layer of the other that stands beside it, or null.
 *
 * @param {LayerOfHeads} layer
 */
export const isSecond = (layer) => roleOf(layer).endsWith("beside");

/**
 * @param {Heads} run
 * @param {number} layer
 */
export function counterpartOf(run, layer) {
  const pair = (run.beside ?? []).find((places) => places.includes(layer));
  return pair === undefined ? null : pair[0] === layer ? pair[1] : pair[0];
}

/**
 * "L3H8"
 *
 * @param {Pick<PageOfHeads, "labels" | "run">} given
 * @param {HeadAt} given
 */
export const headName = ({ labels, run }, { layer, head }) => `${labels[layer]}H${run.layers[layer].heads[head].number ?? head}`;
