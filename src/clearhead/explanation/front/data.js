// ---- The page's data.

import { elementIn } from "../../base/front/dom.js";
import { writeDigits } from "../../base/front/numbers.js";

/** @import { Data, StepData } from "./types.d.ts" */

/**
 * An element of the page.
 *
 * @template {Element} [Kind=HTMLElement]
 * @param {string} id
 * @param {new () => Kind} [kind]
 */
export const byId = (id, kind) => elementIn(document, id, kind);

/** @type {Data} */
export const data = JSON.parse(byId("data").textContent);
writeDigits(data.digits);

const arrayTypes = { float32: Float32Array, float64: Float64Array, int32: Int32Array, uint8: Uint8Array };

/**
 * The numbers of a step as they were in Python, every one exact in a double.
 *
 * @param {StepData} step
 */
export function decode(step) {
  const bytes = Uint8Array.from(atob(step.values), (character) => character.charCodeAt(0));
  return Float64Array.from(new arrayTypes[step.type](bytes.buffer));
}
