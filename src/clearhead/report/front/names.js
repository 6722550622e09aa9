// ---- The names of layers and heads, and the pairs that stand beside each other.

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
 * The role of a layer: "encoder", "decoder", "cross", "self".
 *
 * @param {LayerOfHeads} layer
 */
export const roleOf = (layer) => layer.role ?? layer.kind;

/**
 * Whether a layer is of the second of two recordings, and the layer of the other recording beside it, or null.
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
 * The name of a layer among those of its role: "L3", "3" of a stack, "L3, step 2".
 *
 * @param {string} label
 */
export const rowName = (label) => label.replace(/, cross\b/, "").replace(/^(encoder|decoder) (?=L?\d)/, "");

/**
 * "L3H8", "L3H8, step 2"; where a model has several stacks "decoder 3, cross, head 8, step 2"
 *
 * @param {Pick<PageOfHeads, "labels" | "run">} given
 * @param {HeadAt} given
 */
export function headName({ labels, run }, { layer, head }) {
  const number = run.layers[layer].heads[head].number ?? head;
  const [first, ...more] = labels[layer].split(", ");
  if (/^(\w+ )?L\d/.test(first)) return [`${first}H${number}`, ...more].join(", ");
  const cross = more[0] === "cross" ? [more.shift()] : [];
  return [first, ...cross, `head ${number}`, ...more].join(", ");
}
