// ---- Colours of signed numbers: two hues, and the ground for 0.

import { penOf } from "../../base/front/dom.js";
import { tableOf } from "../../base/front/ramp.js";

/** @import { Table } from "../../base/front/types.d.ts" */

const signedStops = {
  light: ["#6b2f04", "#c8640c", "#f5b877", "#ffffff", "#8cc4de", "#2478b0", "#10286b"],
  dark: ["#ffd9ab", "#e88a2e", "#7c4a17", "#1a1f28", "#1b5378", "#3f9fd6", "#c3e8ff"],
};
export const signedTables = { light: tableOf(signedStops.light), dark: tableOf(signedStops.dark) };

/**
 * The step of a number from −1 to 1; 0 is the ground.
 *
 * @param {number} share
 */
export const signedStep = (share) => Math.round(127.5 + 127.5 * Math.min(1, Math.max(-1, share)));

/**
 * Draws all steps, from the least to the most.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Table} table
 */
export function drawRamp(canvas, table) {
  canvas.width = 256;
  canvas.height = 1;
  const image = new ImageData(256, 1);
  for (let step = 0; step < 256; step++) image.data.set([...table.slice(3 * step, 3 * step + 3), 255], 4 * step);
  penOf(canvas).putImageData(image, 0, 0);
}
