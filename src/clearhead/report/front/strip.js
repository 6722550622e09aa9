// ---- A strip beside a long text: it shows the places of the weight, and the part in sight.

import { make, penOf } from "../../base/front/dom.js";

/**
 * @import { Colours } from "../../base/front/theme.js"
 * @import { Scale } from "./colour.js"
 * @import { Prose } from "./prose.js"
 * @import { Shading } from "./types.d.ts"
 */

const STRIP_WIDE = 14; // CSS pixels wide

export class Strip {
  /** @param {Prose} prose */
  constructor(prose) {
    this.prose = prose;
    this.canvas = make("canvas", "strip");
    this.canvas.setAttribute("aria-hidden", "true"); // the keys scroll the text itself
    this.canvas.title = "where in the text the weight is: click to go there";
    /** @param {PointerEvent} event */
    const go = (event) => {
      const { element } = prose;
      const at = (event.clientY - this.canvas.getBoundingClientRect().top) / this.canvas.clientHeight;
      element.scrollTop = at * element.scrollHeight - element.clientHeight / 2;
      prose.look();
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      go(event);
    });
    this.canvas.addEventListener("pointermove", (event) => event.buttons & 1 && go(event));
  }

  /**
   * The row of the strip for each token.
   *
   * @param {number} height
   */
  rows(height) {
    const { sheet, chunks, words, windowed, spans } = this.prose;
    const whole = sheet.offsetHeight;
    const rows = new Uint16Array(words.length);
    /** @param {number} y */
    const row = (y) => Math.min(height - 1, Math.max(0, Math.floor((y / whole) * height)));
    for (const { from, to, box } of chunks) {
      const [top, tall] = [box.offsetTop, box.offsetHeight];
      for (let index = from; index < to; index++) {
        rows[index] = row(windowed ? top + ((index - from + 0.5) / (to - from)) * tall
          : spans[index].offsetTop + spans[index].offsetHeight / 2);
      }
    }
    return rows;
  }

  /**
   * `shading`: { weights, fair } where this text is shaded, or null. `marked`: tokens to mark at the edge.
   *
   * @param {Pick<Shading, "weights" | "fair"> | null} shading
   * @param {Scale} scale
   * @param {Iterable<number>} marked
   * @param {Colours} colours
   */
  draw(shading, scale, marked, colours) {
    const { canvas, prose } = this;
    const { element } = prose;
    canvas.hidden = element.scrollHeight <= element.clientHeight + 1;
    if (canvas.hidden) return;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${element.clientHeight}px`;
    canvas.width = Math.round(STRIP_WIDE * ratio);
    canvas.height = Math.round(element.clientHeight * ratio);
    const { width, height } = canvas;
    const pen = penOf(canvas);
    const rows = this.rows(height);
    const most = new Float64Array(height); // the largest weight of each row, and the token that has it
    const token = new Int32Array(height).fill(-1);
    shading?.weights.forEach((weight, index) => {
      if (!(weight > shading.fair[index]) || weight <= most[rows[index]]) return;
      most[rows[index]] = weight;
      token[rows[index]] = index;
    });
    const tall = Math.max(1, Math.round(2 * ratio));
    token.forEach((index, row) => {
      if (index < 0 || !shading) return;
      const step = scale.step(scale.value(most[row], 1 / shading.fair[index]));
      pen.fillStyle = scale.css(step);
      pen.fillRect(Math.round(3 * ratio), row, width, tall);
    });
    pen.fillStyle = colours.accent;
    for (const index of marked) pen.fillRect(0, rows[index] - tall, Math.round(5 * ratio), 2 * tall);
    pen.strokeStyle = colours.ink;
    pen.lineWidth = ratio;
    const top = (element.scrollTop / element.scrollHeight) * height;
    pen.strokeRect(ratio / 2, top + ratio / 2, width - ratio, (element.clientHeight / element.scrollHeight) * height - ratio);
  }
}
