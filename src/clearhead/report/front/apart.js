// ---- The map of differences: two hues, on a square root's scale, so that small differences are seen beside large ones.

import { penOf } from "../../base/front/dom.js";
import { hatching } from "./colour.js";
import { signedStep, signedTables } from "./signed.js";

/**
 * @import { Theme } from "../../base/front/theme.js"
 * @import { Axis, Layout } from "./layout.js"
 * @import { Difference } from "./types.d.ts"
 */

const LESS = "#b8590b"; // in both themes

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Difference} given
 * @param {Layout} layout
 * @param {Theme} given
 */
export function drawDifference(canvas, { pool, limit, byQuery, byKey }, layout, { dark, colours }) {
  const { left, top, across, down, ratio, unit, width, height, right, words } = layout;
  const table = signedTables[dark ? "dark" : "light"];
  Object.assign(canvas, { width, height });
  canvas.style.width = `${width / ratio}px`;
  canvas.style.height = `${height / ratio}px`;
  const pen = penOf(canvas);
  pen.fillStyle = hatching(pen, colours, ratio);
  pen.fillRect(left, top, across.length, down.length);
  const image = new ImageData(across.cells, down.cells);
  pool.forEach((apart, cell) => {
    if (apart !== apart) return;
    const step = 3 * signedStep(Math.sign(apart) * Math.sqrt(Math.abs(apart) / limit));
    image.data.set([...table.subarray(step, step + 3), 255], 4 * cell);
  });
  const small = Object.assign(document.createElement("canvas"), { width: across.cells, height: down.cells });
  penOf(small).putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, left, top, across.length, down.length);
  pen.strokeStyle = colours.line;
  pen.strokeRect(left - 0.5, top - 0.5, across.length + 1, down.length + 1);

  /**
   * For each cell of an axis: the value of largest size among its tokens, its beginning, and its thickness.
   *
   * @param {Axis} axis
   * @param {Float64Array} values
   * @param {(most: number, at: number, thick: number) => void} show
   */
  const cells = (axis, values, show) => {
    for (let cell = 0; cell < axis.cells; cell++) {
      const own = values.subarray(cell * axis.per, (cell + 1) * axis.per);
      const most = own.reduce((found, value) => (Math.abs(value) > Math.abs(found) ? value : found), 0);
      show(most, cell * axis.cell, Math.max(1, axis.cell - (axis.cell > 3 * ratio ? ratio : 0)));
    }
  };
  pen.fillStyle = colours.bar;
  cells(down, byQuery, (value, at, thick) => (
    pen.fillRect(left + across.length + 4 * unit, top + at, ((right - 6 * unit) * value) / Math.LN2, thick)));
  const half = 0.5 * (top - words) - 2 * unit;
  const most = byKey.reduce((found, value) => Math.max(found, Math.abs(value)), 1e-9);
  cells(across, byKey, (value, at, thick) => {
    pen.fillStyle = value > 0 ? colours.bar : LESS;
    pen.fillRect(left + at, top - 2 * unit - half, thick, (-half * value) / most);
  });
}
