// ---- The lens: the pairs around one, large, always with their words.

import { penOf } from "../../base/front/dom.js";
import { hatching } from "./colour.js";
import { labelSigns } from "./layout.js";
import { SMALL } from "./marks.js";
import { weightsOf } from "./tiles.js";
import { countsOf } from "./weights.js";
import { shortened } from "./words.js";

/**
 * @import { Colours } from "../../base/front/theme.js"
 * @import { Layout } from "./layout.js"
 * @import { FullPair, Shown, WeightedPair, Word } from "./types.d.ts"
 */

const LENS = 15; // pairs a side
const NEAR = 14; // CSS pixels that stay free around the pair

export class Lens {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    /** @type {{ rows: string[], columns: string[], values: WeightedPair[] } | null} what it shows, for tests */
    this.seen = null;
    this.corner = 0;
  }

  hide() {
    this.canvas.hidden = true;
    this.seen = null;
  }

  /**
   * Shows the pairs around a pair, in a place that does not hide the pair on the map.
   *
   * @param {Shown} given
   * @param {FullPair} given
   * @param {Layout} layout
   * @param {Colours} colours
   * @param {string} odd
   */
  show({ head, names, scale }, { i, j }, layout, colours, odd) {
    const { ratio, unit } = layout;
    const narrow = layout.width / ratio < 480;
    const cell = Math.round((narrow ? 10 : 14) * unit);
    const signs = narrow ? 7 : 10;
    /** @param {Word[]} words */
    const room = (words) => Math.round((12 + 6.6 * Math.min(signs, labelSigns(words, Infinity))) * unit);
    const [left, top] = [room(names[0]), room(names[1])];
    const [rows, columns] = [Math.min(LENS, head.queries), Math.min(LENS, head.keys)];
    /**
     * @param {number} at
     * @param {number} size
     * @param {number} count
     */
    const within = (at, size, count) => Math.max(0, Math.min(count - size, at - Math.floor(size / 2)));
    const [firstRow, firstColumn] = [within(i, rows, head.queries), within(j, columns, head.keys)];
    const { canvas } = this;
    const edge = Math.round(6 * unit);
    canvas.hidden = false;
    canvas.width = left + columns * cell + edge;
    canvas.height = top + rows * cell + edge;
    canvas.style.width = `${canvas.width / ratio}px`;
    canvas.style.height = `${canvas.height / ratio}px`;
    const pen = penOf(canvas);
    pen.fillStyle = hatching(pen, colours, ratio);
    pen.fillRect(left, top, columns * cell, rows * cell);
    const counts = countsOf(head);
    const values = new Float64Array(columns);
    /** @type {{ rows: string[], columns: string[], values: WeightedPair[] }} */
    const seen = { rows: [], columns: [], values: [] };
    this.seen = seen;
    for (let row = 0; row < rows; row++) {
      const query = firstRow + row;
      const from = Math.max(firstColumn, head.start[query]);
      const to = Math.max(from, Math.min(firstColumn + columns, head.stop[query]));
      weightsOf(head, query, from, to, values);
      for (let key = from; key < to; key++) {
        const weight = values[key - from];
        if (weight < 0) continue;
        pen.fillStyle = weight === weight ? scale.css(scale.step(scale.value(weight, counts[query]))) : odd;
        pen.fillRect(left + (key - firstColumn) * cell, top + row * cell, cell, cell);
        seen.values.push([query, key, weight]);
      }
    }
    pen.textBaseline = "middle";
    /**
     * @param {Word[]} words
     * @param {number} index
     */
    const word = (words, index) => shortened(words[index].label, signs);
    /**
     * @param {string} text
     * @param {boolean} chosen
     * @param {number} x
     * @param {number} y
     * @param {number} turn
     * @param {"left" | "right"} align
     */
    const write = (text, chosen, x, y, turn, align) => {
      pen.save();
      pen.translate(x, y);
      pen.rotate(turn);
      pen.textAlign = align;
      pen.font = `${chosen ? "600 " : ""}${Math.round((narrow ? 9 : 11) * unit)}${SMALL}`;
      pen.fillStyle = chosen ? colours.accent : colours.ink;
      pen.fillText(text, 0, 0, (align === "right" ? left : top) - 6 * unit);
      pen.restore();
    };
    for (let row = 0; row < rows; row++) {
      seen.rows.push(word(names[0], firstRow + row));
      write(seen.rows[row], firstRow + row === i, left - 4 * unit, top + (row + 0.5) * cell, 0, "right");
    }
    for (let column = 0; column < columns; column++) {
      seen.columns.push(word(names[1], firstColumn + column));
      const x = left + (column + 0.5) * cell;
      write(seen.columns[column], firstColumn + column === j, x, top - 4 * unit, -Math.PI / 2, "left");
    }
    pen.strokeStyle = colours.accent;
    pen.lineWidth = Math.max(1, Math.round(1.5 * unit));
    const half = pen.lineWidth / 2;
    pen.strokeRect(left + (j - firstColumn) * cell - half, top + (i - firstRow) * cell - half,
      cell + 2 * half, cell + 2 * half);
    this.dock(layout, i, j);
  }

  /**
   * Places the lens in the longest corner of the map's box that leaves the pair free, or under the map.
   *
   * @param {Layout} layout
   * @param {number} i
   * @param {number} j
   */
  dock(layout, i, j) {
    const { ratio, left, top, across, down } = layout;
    const box = this.canvas.parentElement;
    const after = box?.nextElementSibling;
    if (!box || !(after instanceof HTMLElement)) return;
    const [wide, tall] = [this.canvas.width / ratio, this.canvas.height / ratio];
    const x = (left + across.startOf(j) + across.cell / 2) / ratio;
    const y = (top + down.startOf(i) + down.cell / 2) / ratio;
    const [right, below] = [box.clientWidth - wide, (top + down.room) / ratio - tall];
    const corners = [[right, top / ratio], [0, top / ratio], [0, below], [right, below]];
    /** @param {number[]} given */
    const clear = ([a, b]) => a >= 0 && b >= 0 &&
      (x < a - NEAR || x > a + wide + NEAR || y < b - NEAR || y > b + tall + NEAR);
    if (!clear(corners[this.corner])) this.corner = Math.max(0, corners.findIndex(clear));
    const under = [0, layout.height / ratio + after.offsetHeight + 6];
    const [a, b] = clear(corners[this.corner]) ? corners[this.corner] : under;
    this.canvas.style.left = `${a}px`;
    this.canvas.style.top = `${b}px`;
  }
}
