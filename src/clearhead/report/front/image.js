// ---- A picture whose patches are the tokens: the weights of the chosen token lie over it.

import { penOf } from "../../base/front/dom.js";
import { countsOf } from "./weights.js";
import { nameOf } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Pair, Shown } from "./types.d.ts"
 */

const WIDE = 640; // the most CSS pixels of the picture

export class ImagePane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.box = page.find("image");
    this.canvas = page.find("image-picture", HTMLCanvasElement);
    /** @type {HTMLCanvasElement | null} the picture itself */
    this.picture = null;
    /** @type {number | null} the token under the pointer */
    this.pointed = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(this.tokenAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => {
      const token = this.tokenAt(event);
      if (token !== null) page.choose({ token, pair: null });
    });
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** The picture of the page, where the shown head looks at it. */
  get image() {
    const { run, now } = this.page;
    const { image } = run;
    return image && now.layer.kind === "self" && now.layer.queries === image.extra + image.rows * image.columns ? image : null;
  }

  /** @param {Shown} shown */
  async paint(shown) {
    const { image, page } = this;
    this.box.hidden = image === null;
    if (image === null) return;
    if (!this.picture) {
      const bytes = await page.run.array(image.place);
      const made = document.createElement("canvas");
      made.width = image.width;
      made.height = image.height;
      const data = new ImageData(image.width, image.height);
      for (let at = 0; at < image.width * image.height; at++) data.data.set([bytes[3 * at], bytes[3 * at + 1], bytes[3 * at + 2], 255], 4 * at);
      penOf(made).putImageData(data, 0, 0);
      this.picture = made;
    }
    if (shown === page.shown) this.draw();
  }

  draw() {
    const { canvas, image, page, picture } = this;
    if (!image || !picture || !page.shown?.look) return;
    const { look, scale, head, names, view } = page.now;
    const ratio = window.devicePixelRatio || 1;
    const cell = Math.max(4, Math.floor((Math.min(WIDE, this.box.clientWidth) * ratio) / image.columns));
    canvas.width = cell * image.columns;
    canvas.height = cell * image.rows;
    canvas.style.width = `${canvas.width / ratio}px`;
    const pen = penOf(canvas);
    pen.drawImage(picture, 0, 0, canvas.width, canvas.height);
    const counts = countsOf(head);
    for (let patch = 0; patch < image.rows * image.columns; patch++) {
      const token = image.extra + patch;
      const count = counts[view === "out" ? look.token : token];
      const weight = look.weights[token];
      const [x, y] = [(patch % image.columns) * cell, Math.floor(patch / image.columns) * cell];
      pen.globalAlpha = weight * count > 1 ? 0.65 : 0.3;
      pen.fillStyle = weight * count > 1 ? scale.css(scale.step(scale.value(weight, count))) : page.theme.colours.panel;
      pen.fillRect(x, y, cell, cell);
    }
    pen.globalAlpha = 1;
    this.frame(pen, look.token, cell, page.theme.colours.accent);
    if (this.pointed !== null) this.frame(pen, this.pointed, cell, page.theme.colours.ink);
    const out = view === "out";
    canvas.setAttribute("aria-label", `${image.rows} × ${image.columns} patches, ${nameOf(names[out ? 0 : 1], look.token)} is chosen: arrow keys choose another`);
    canvas.dataset.drawn = `${page.view.layer}/${page.view.head}/${view}/${look.token}`;
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {number} token
   * @param {number} cell
   * @param {string} colour
   */
  frame(pen, token, cell, colour) {
    const { image } = this;
    const patch = image ? token - image.extra : -1;
    if (!image || patch < 0) return;
    pen.strokeStyle = colour;
    pen.lineWidth = Math.max(2, cell / 12);
    pen.strokeRect((patch % image.columns) * cell, Math.floor(patch / image.columns) * cell, cell, cell);
  }

  /** @param {MouseEvent} event */
  tokenAt(event) {
    const { image, canvas } = this;
    if (!image) return null;
    const { width, height } = canvas.getBoundingClientRect();
    const column = Math.floor((event.offsetX / width) * image.columns);
    const row = Math.floor((event.offsetY / height) * image.rows);
    return column >= 0 && column < image.columns && row >= 0 && row < image.rows ? image.extra + row * image.columns + column : null;
  }

  /**
   * Previews the pair of a patch with the chosen token.
   *
   * @param {number | null} token
   */
  point(token) {
    if (!this.page.shown?.look) return;
    const { look, view } = this.page.now;
    this.page.hover(token === null ? null : view === "out" ? { i: look.token, j: token } : { i: token, j: look.token });
  }

  /** @param {Pair | null} pair */
  hover(pair) {
    if (!this.page.shown?.look) return;
    const found = this.page.now.view === "out" ? pair?.j : pair?.i;
    this.pointed = found ?? null;
    this.draw();
  }

  /** @param {KeyboardEvent} event */
  move(event) {
    const { image, page } = this;
    if (!image) return;
    /** @type {Record<string, number>} */
    const ways = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -image.columns, ArrowDown: image.columns };
    if (!Object.hasOwn(ways, event.key)) return;
    event.preventDefault();
    const last = image.rows * image.columns - 1;
    const patch = Math.min(last, Math.max(0, page.view.own - image.extra + ways[event.key]));
    page.choose({ token: image.extra + patch, pair: null }, false);
  }
}
