// ---- From a weight to a colour.

import { penOf } from "../../base/front/dom.js";
import { cssColour, inkOn, tableOf, tables } from "../../base/front/ramp.js";
import { percent, times } from "./words.js";

/** @import { Colours } from "../../base/front/theme.js" */

// Colours of less than uniform differ less from the background than colours of more.
const below = { light: ["#ece5d8", "#ffffff"], dark: ["#302a20", "#1a1f28"] };
const LEAST = 1 / 64; // times uniform: smaller multiples have the colour of this one

/**
 * 256 colours: 128 is uniform, smaller steps are less than uniform, larger ones more.
 *
 * @param {"light" | "dark"} name
 */
function divergingTable(name) {
  const table = new Uint8ClampedArray(256 * 3);
  const less = tableOf(below[name]);
  const more = tables[name];
  for (let step = 0; step < 256; step++) {
    const from = step < 128 ? less : more;
    const at = 3 * Math.round(step < 128 ? (step * 255) / 128 : ((step - 128) * 255) / 127);
    for (let c = 0; c < 3; c++) table[3 * step + c] = from[at + c];
  }
  return table;
}

const diverging = { light: divergingTable("light"), dark: divergingTable("dark") };

/**
 * The colours of one head. `kind`: "uniform", times what a query would give each key that it may see if it gave all
 * alike, on a log scale; "log", the weight on a log scale from a tenth of the least uniform share; "linear", the weight.
 * `most`: the keys that the query sees that sees the most.
 */
export class Scale {
  /**
   * @param {string} kind
   * @param {number} most
   * @param {boolean} dark
   */
  constructor(kind, most, dark) {
    this.kind = kind;
    this.relative = kind === "uniform";
    this.most = Math.max(2, most);
    const name = dark ? "dark" : "light";
    this.table = (this.relative ? diverging : tables)[name];
  }

  /**
   * The coloured number of a weight in the row of a query that sees `count` keys.
   *
   * @param {number} weight
   * @param {number} count
   */
  value(weight, count) {
    return this.relative ? weight * count : weight;
  }

  /**
   * The step, 0 to 255, of a coloured number.
   *
   * @param {number} value
   */
  step(value) {
    let share = value;
    if (this.kind === "log") share = 1 - Math.log(value) / Math.log(0.1 / this.most);
    if (this.relative) {
      const log = Math.log(value);
      share = value < 1 ? 0.5 * (1 - log / Math.log(LEAST)) : 0.5 + (127 / 255) * (log / Math.log(this.most));
    }
    return Math.round(255 * Math.min(1, Math.max(0, share)));
  }

  /** @param {number} step */
  css(step) {
    return cssColour(this.table, step);
  }

  /** @param {number} step */
  ink(step) {
    return inkOn(this.table, step);
  }

  /**
   * The numbers that the legend marks, with their words.
   *
   * @returns {[number, string][]}
   */
  get ticks() {
    if (this.kind === "linear") return [[0, "0%"], [0.5, "50%"], [1, "100%"]];
    if (this.kind === "log") {
      const floor = 0.1 / this.most;
      /** @type {[number, string][]} */
      const ticks = [[floor, `≤ ${percent(floor)}`]];
      for (let weight = 0.1; weight > 4 * floor; weight /= 10) ticks.push([weight, percent(weight)]);
      return [...ticks, [1, "100%"]];
    }
    /** @type {[number, string][]} */
    const ticks = [[LEAST, "≤ 1/64 ×"], [1 / 8, "1/8 ×"], [1, "1 × uniform"]];
    for (let ratio = this.most > 300 ? 10 : 4; ratio < this.most / 2; ratio *= this.most > 300 ? 10 : 4) {
      ticks.push([ratio, times(ratio)]);
    }
    return [...ticks, [this.most, times(this.most)]];
  }
}

/**
 * A pattern of slanted lines, for pairs that are not allowed.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {Colours} colours
 * @param {number} ratio
 */
export function hatching(context, colours, ratio) {
  const size = Math.round(6 * ratio);
  const tile = document.createElement("canvas");
  tile.width = size;
  tile.height = size;
  const pen = penOf(tile);
  pen.fillStyle = colours.panel;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = colours.hatch;
  pen.lineWidth = ratio;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  if (!pattern) throw new Error("this browser cannot draw a pattern");
  return pattern;
}
