// ---- The page's data.

export const byId = (id) => document.getElementById(id);
export const data = JSON.parse(byId("data").textContent);

const arrayTypes = { float32: Float32Array, float64: Float64Array, int32: Int32Array, uint8: Uint8Array };

/** The numbers of a step as they were in Python, every one exact in a double. */
export function decode(step) {
  const bytes = Uint8Array.from(atob(step.values), (character) => character.charCodeAt(0));
  return Float64Array.from(new arrayTypes[step.type](bytes.buffer));
}
