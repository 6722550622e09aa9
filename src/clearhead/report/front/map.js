// ---- The weights of one head as a picture: from the whole head to single pairs.

import { penOf } from "../../base/front/dom.js";
import { hatching } from "./colour.js";
import { Helper } from "./helper.js";
import { Layout } from "./layout.js";
import { paintLegend } from "./legend.js";
import { Lens } from "./lens.js";
import { announceMap, describeMap, sayPair } from "./map_words.js";
import { drawBars, drawCross, drawLabels, hasWords, labelled } from "./marks.js";
import { Picture } from "./picture.js";
import { isSimple } from "./simple.js";
import { steer } from "./steer.js";

/**
 * @import { Axis } from "./layout.js"
 * @import { Page } from "./mount.js"
 * @import { Pair, Readers, Shown, Sketch } from "./types.d.ts"
 */

/**
 * A part of the map in an address: queries from and to, keys from and to.
 *
 * @param {string | null} text
 */
function rectangleIn(text) {
  if (text === null || !/^\d{1,9}(\.\d{1,9}){3}$/.test(text)) return null;
  const [top, bottom, left, right] = text.split(".").map(Number);
  return top < bottom && left < right ? text : null;
}

/** @satisfies {Readers} what this pane reads of the address */
export const ADDRESS_OF_MAP = { zoom: rectangleIn, pool: (text) => (text === "mean" ? "mean" : null) };

export class MapPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.canvas = page.find("map", HTMLCanvasElement);
    this.under = page.find("map-picture", HTMLCanvasElement);
    /** @type {Layout | null} */
    this.made = null;
    this.frame = ""; // the state for which the layout was made
    /** @type {string | null} the part that is seen, as the address has it */
    this.zoomed = null;
    this.pair = "";
    /** @type {CanvasPattern | null} */
    this.hatch = null;
    /** @type {number | null} */
    this.frameAsked = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.telling = undefined;
    this.stale = false;
    this.closed = false; // whether the lens was closed, with Escape
    this.helper = new Helper();
    this.picture = new Picture(this.helper, () => this.schedule());
    this.lens = new Lens(page.find("lens", HTMLCanvasElement));
    steer(this);
  }

  /** The geometry of the map. */
  get layout() {
    if (!this.made) throw new Error("the map has not been laid out yet");
    return this.made;
  }

  close() {
    this.helper.close();
  }

  /** The geometry of the map and what it shows. */
  get geometry() {
    const { layout } = this;
    /**
     * @param {Axis} axis
     */
    const side = (axis) => {
      const { count, per, cell, cells, length, room, offset, seen } = axis;
      const words = hasWords(axis, layout.unit) ? labelled(axis, layout.unit, 0) : [];
      return { count, per, cell, cells, length, room, offset, seen, words };
    };
    const { left, top, ratio } = layout;
    return {
      left, top, ratio, ...this.kind, lens: this.lens.seen,
      down: side(layout.down), across: side(layout.across),
    };
  }

  /** The numbers of the cells of the whole view, row by row; NaN for cells that are not computed yet. */
  get cells() {
    return this.picture.valuesOf(this.page.drawn.head, this.layout, this.kind);
  }

  /** The meaning of the cells' numbers. */
  get kind() {
    const { layout, page } = this;
    return { mean: page.view.pool === "mean" && !layout.single, relative: page.drawn.scale.relative };
  }

  /** @param {Shown | Sketch} shown */
  paint(shown) {
    const { page } = this;
    const { head, layer } = shown;
    const ratio = window.devicePixelRatio || 1;
    const width = page.find("map-box").clientWidth;
    const tallest = Math.max(280, Math.round(0.84 * window.innerHeight));
    const large = page.host.hasAttribute("data-large");
    const bars = !isSimple(page.view);
    const frame = [width, tallest, ratio, large, bars, head.queries, head.keys, layer.queryText, layer.keyText].join();
    if (this.frame !== frame) {
      this.frame = frame;
      this.made = new Layout(head, shown.names, width, tallest, ratio, large, bars);
      this.zoomed = null;
    }
    const { zoom } = page.view;
    if (this.zoomed !== zoom) this.layout.show(zoom);
    this.zoomed = zoom;
    this.size();
    this.follow(shown);
    paintLegend(page, shown);
    this.lens.hide();
    this.hatch = null;
    page.host.dataset.map = "drawing";
    sayPair(this);
    describeMap(this);
    announceMap(this);
    this.look();
    if (page.theme.print.matches) this.draw(); // a printed page does not wait for a frame
  }

  /**
   * Draws the whole head from its pyramid. Other views are computed when the head has been read.
   *
   * @param {Sketch} shown
   */
  sketch(shown) {
    if (this.page.view.zoom === null) this.paint(shown);
  }

  /**
   * Shows a pair that has become the chosen one and is out of sight.
   *
   * @param {Pair} given
   */
  follow({ i, j }) {
    const pair = `${this.frame} ${i} ${j}`;
    const before = this.pair;
    this.pair = pair;
    if (i === null || j === null || before === pair || !before.startsWith(this.frame)) return;
    this.layout.down.reveal(i);
    this.layout.across.reveal(j);
    this.tell();
  }

  /** The view has changed: asks for its tiles, and draws what is there. */
  look() {
    const { layout, picture, page, kind } = this;
    picture.want(picture.inSight(page.drawn.head, layout, kind));
    this.schedule();
  }

  /** Puts the view into the address, without a step for Back. */
  tell() {
    const { view, turn } = this.page;
    this.zoomed = this.layout.address;
    if (view.zoom === this.zoomed) return;
    view.zoom = this.zoomed;
    clearTimeout(this.telling);
    this.telling = setTimeout(() => {
      if (turn !== this.page.turn) return; // a later choice has its own address
      announceMap(this);
      this.page.onaddress(view.address, false);
    }, 150);
  }

  size() {
    const { layout } = this;
    const { width, height, ratio } = layout;
    for (const canvas of [this.canvas, this.under]) {
      if (canvas.width !== width) canvas.width = width;
      if (canvas.height !== height) canvas.height = height;
      canvas.style.width = `${width / ratio}px`;
      canvas.style.height = `${height / ratio}px`;
    }
  }

  hover() {
    sayPair(this);
    this.scheduleMarks();
  }

  /** Draws with the next frame. */
  schedule() {
    this.stale = true;
    this.scheduleMarks();
  }

  scheduleMarks() {
    this.frameAsked ??= requestAnimationFrame(() => {
      this.frameAsked = null;
      if (this.stale) {
        this.stale = false;
        this.draw();
      }
      this.drawMarks();
    });
  }

  draw() {
    const { layout, page, under } = this;
    const shown = page.drawn;
    const { colours } = page.theme;
    const { left, top, across, down } = layout;
    const pen = penOf(under);
    pen.clearRect(0, 0, under.width, under.height);
    this.hatch ??= hatching(pen, colours, layout.ratio);
    pen.save();
    pen.beginPath();
    pen.rect(left, top, across.room, down.room);
    pen.clip();
    pen.translate(left, top);
    const all = this.picture.draw(pen, shown, layout, this.kind, this.hatch, this.odd);
    pen.restore();
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.strokeRect(left - 0.5, top - 0.5, across.room + 1, down.room + 1);
    if (layout.bars) drawBars(pen, shown, layout, page.view.pool === "mean", colours);
    drawLabels(pen, shown, layout, colours);
    if (all) page.host.dataset.map = "drawn";
  }

  /** The colour of NaN. */
  get odd() {
    return this.page.theme.dark ? "#ff5c5c" : "#e00000";
  }

  /** The current pair: the pair under the pointer or previewed in the text, else the chosen pair. */
  get meant() {
    const { hovered, shown } = this.page;
    return hovered ?? { i: shown?.i ?? null, j: shown?.j ?? null };
  }

  /** Marks the current pair over the picture, which stays the same. */
  drawMarks() {
    const { canvas, layout, page } = this;
    const { colours } = page.theme;
    const pen = penOf(canvas);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    const pair = this.meant;
    drawCross(pen, page.drawn, pair, layout, colours);
    const pointed = page.hovered || page.root.activeElement === canvas;
    const { i, j } = pair;
    const { shown } = page;
    const worded = [layout.down, layout.across].every((axis) => hasWords(axis, layout.unit)); // the map says it all
    if (!pointed || worded || i === null || j === null || !shown?.look || this.closed) this.lens.hide();
    else this.lens.show(shown, { i, j }, layout, colours, this.odd);
  }

  /** Called when another part of the map is in sight. */
  changed() {
    this.tell();
    this.page.host.dataset.map = "drawing";
    this.look();
  }
}
