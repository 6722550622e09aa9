// ---- The geometry of the map, in device pixels. Nothing is drawn here.

import { weightsOf } from "./tiles.js";

/** @import { Afar, FullPair, Head, MapScale, Names, Pair, Word } from "./types.d.ts" */

export const SMALLEST_LABELLED = 12; // CSS pixels of a cell beside which a token's label fits
const LARGEST_CELL = 44; // CSS pixels: a text of few tokens does not fill the screen
const MOST_EXACT = 16; // weights a pixel side that are computed where there is a map from afar
export const BARS = 36; // CSS pixels for the bars above the map, and to its right
const MARKS = 6; // the same without bars, for the marks of a pair
const LABEL_SIGNS = 12; // a label is cut to this many signs

/** @type {WeakMap<Word[], number>} the most signs in a token of a text */
const longest = new WeakMap();

/**
 * The label of a word beside a map: of two texts as one "street/road", where the second has another word.
 *
 * @param {Word} word
 */
export const axisLabel = ({ label, other }) => (other === undefined ? label : `${label}/${other}`);

/**
 * The largest number of signs in a token of a text, at most as many as a label shows.
 *
 * @param {Word[]} words
 * @param {number} width
 */
export function labelSigns(words, width) {
  const most = longest.get(words) ?? words.reduce((found, word) => Math.max(found, axisLabel(word).length), 0);
  longest.set(words, most);
  return Math.min(most, width < 480 ? 8 : LABEL_SIGNS);
}

/**
 * The scales of one axis of `count` tokens in `room` pixels, from the whole to single tokens: `per` tokens in a cell of
 * `cell` pixels. Whole pixels a cell, whole tokens a pixel. `afar`: the tokens in a cell of the map from afar, or 0.
 * `fill`: whether few tokens fill the room too.
 *
 * @param {number} count
 * @param {number} room
 * @param {number} ratio
 * @param {number} afar
 * @param {boolean} fill
 * @returns {MapScale[]}
 */
function scalesOf(count, room, ratio, afar, fill) {
  const most = Math.max(Math.round(LARGEST_CELL * ratio), fill ? Math.floor(room / count) : 0);
  const fit = Math.max(1, Math.ceil(count / room));
  const scales = [];
  if (afar) {
    scales.push({ per: Math.max(fit, afar), cell: 1 });
    for (let cell = 1; afar / cell > MOST_EXACT; cell *= 2) if (cell > 1 || fit > afar) scales.push({ per: afar, cell });
  } else scales.push({ per: fit, cell: fit > 1 ? 1 : Math.max(1, Math.min(most, Math.floor(room / count))) });
  const last = scales[scales.length - 1];
  for (let per = 1024; per > 1; per /= 2) if (per < last.per / last.cell) scales.push({ per, cell: 1 });
  let cell = last.per === 1 ? last.cell : 0;
  while (cell < most) {
    cell = Math.min(most, Math.max(cell + 1, Math.round(cell * 1.25)));
    scales.push({ per: 1, cell });
  }
  return scales;
}

/** One side of the map: its scales, the current scale, and the pixel of the whole at which the picture begins. */
export class Axis {
  /**
   * @param {number} count
   * @param {number} room
   * @param {number} ratio
   * @param {number} afar
   * @param {boolean} fill
   */
  constructor(count, room, ratio, afar, fill) {
    this.count = count;
    this.scales = scalesOf(count, room, ratio, afar, fill);
    this.at = 0;
    this.offset = 0;
    this.room = this.length; // the whole picture's; zooming does not change it
  }

  get per() {
    return this.scales[this.at].per;
  }

  get cell() {
    return this.scales[this.at].cell;
  }

  /** All cells at this scale. */
  get cells() {
    return Math.ceil(this.count / this.per);
  }

  /** The length of all of them. */
  get length() {
    return this.cells * this.cell;
  }

  /**
   * Pixels a token.
   *
   * @param {MapScale} scale
   */
  pixelsOf(scale) {
    return scale.cell / scale.per;
  }

  get pixels() {
    return this.pixelsOf(this.scales[this.at]);
  }

  /**
   * Where the cell of token `index` begins in the picture.
   *
   * @param {number} index
   */
  startOf(index) {
    return Math.floor(index / this.per) * this.cell - this.offset;
  }

  /**
   * The first token of the cell under a pixel of the picture.
   *
   * @param {number} pixel
   */
  tokenAt(pixel) {
    return Math.min(this.cells - 1, Math.max(0, Math.floor((pixel + this.offset) / this.cell))) * this.per;
  }

  /** The tokens that are seen whole or in part: [first, behind the last]. */
  get seen() {
    const last = Math.ceil((this.offset + this.room) / this.cell) * this.per;
    return [Math.floor(this.offset / this.cell) * this.per, Math.min(this.count, last)];
  }

  /** @param {number} offset */
  moveTo(offset) {
    this.offset = Math.round(Math.min(this.length - this.room, Math.max(0, offset)));
  }

  /**
   * Changes the scale. The token under a pixel stays there.
   *
   * @param {number} at
   * @param {number} pixel
   */
  scaleTo(at, pixel) {
    const token = ((pixel + this.offset) / this.cell) * this.per;
    this.at = at;
    this.moveTo((token / this.per) * this.cell - pixel);
  }

  /**
   * The scale nearest to this number of pixels for each token.
   *
   * @param {number} pixels
   */
  nearest(pixels) {
    /** @param {MapScale} scale */
    const apart = (scale) => Math.abs(Math.log(this.pixelsOf(scale) / pixels));
    return this.scales.reduce((best, scale, at) => (apart(scale) < apart(this.scales[best]) ? at : best), 0);
  }

  /**
   * Shows the tokens from `first` to before `last` at the largest scale that fits them.
   *
   * @param {number} first
   * @param {number} last
   */
  show(first, last) {
    this.at = 0;
    this.scales.forEach((scale, at) => {
      if ((last - first) * this.pixelsOf(scale) <= this.room) this.at = at;
    });
    this.moveTo((first / this.per) * this.cell);
  }

  /**
   * Moves by the smallest distance that shows token `index`.
   *
   * @param {number} index
   */
  reveal(index) {
    const start = this.startOf(index);
    if (start < 0) this.moveTo(this.offset + start);
    if (start + this.cell > this.room) this.moveTo(this.offset + start + this.cell - this.room);
  }
}

/**
 * Device pixels of what is one CSS pixel beside letters of the usual size: letters on a map grow with those of the page.
 *
 * @param {number} ratio
 */
const unitOf = (ratio) => ratio * Math.max(1, parseFloat(getComputedStyle(document.documentElement).fontSize) / 16);

/**
 * The geometry of the map of `head` in a box `width` CSS pixels wide. `fill`: whether a map of one text on itself is as wide
 * as the box, with cells wider than high, and not a square. `bars`: whether there is room for bars above and at the right.
 */
export class Layout {
  /**
   * @param {Afar} head
   * @param {Names} names
   * @param {number} width
   * @param {number} tallest
   * @param {number} ratio
   * @param {boolean} [fill]
   * @param {boolean} [bars]
   */
  constructor(head, names, width, tallest, ratio, fill = false, bars = true) {
    this.ratio = ratio;
    const unit = unitOf(ratio);
    this.unit = unit;
    this.bars = bars;
    /** @param {Word[]} words */
    const room = (words) => Math.max(40, 14 + 6.8 * labelSigns(words, width));
    const right = Math.round((!bars ? MARKS : !head.entropy ? 2 : width < 480 ? 22 : BARS) * unit);
    this.right = right;
    this.left = Math.round(room(names[0]) * unit);
    this.words = Math.round(room(names[1]) * unit); // the room for the words above
    this.top = this.words + Math.round((bars ? BARS : MARKS) * unit);
    const acrossRoom = Math.max(40, Math.floor((width - 2) * ratio) - this.left - right);
    const downRoom = Math.max(40, Math.floor(tallest * ratio) - this.top);
    const square = Math.min(acrossRoom, downRoom);
    const same = head.queries === head.keys && !fill;
    this.across = new Axis(head.keys, same ? square : acrossRoom, unit, head.pyramid?.perColumn ?? 0, fill);
    this.down = new Axis(head.queries, same ? square : downRoom, unit, head.pyramid?.perRow ?? 0, fill);
    this.width = this.left + this.across.room + right + Math.ceil(2 * ratio);
    this.height = this.top + this.down.room + Math.ceil(2 * ratio);
  }

  get whole() {
    return this.down.at === 0 && this.across.at === 0;
  }

  get closest() {
    return [this.down, this.across].every((axis) => axis.at === axis.scales.length - 1);
  }

  /** Whether each cell is one pair. */
  get single() {
    return this.down.per === 1 && this.across.per === 1;
  }

  /** The longer side leads. The other side is no smaller than it, and no larger than its tokens need. */
  get lead() {
    return this.across.count >= this.down.count ? this.across : this.down;
  }

  /**
   * Changes to another scale of the leading side. The pair under a point of the picture stays there.
   *
   * @param {number} to
   * @param {number} x
   * @param {number} y
   */
  scaleTo(to, x, y) {
    const { across, down, lead } = this;
    const [other, at, otherAt] = lead === across ? [down, x, y] : [across, y, x];
    if (to === lead.at || !lead.scales[to]) return;
    lead.scaleTo(to, at);
    const least = other.pixelsOf(other.scales[0]);
    other.scaleTo(other.nearest(Math.max(lead.pixels, least)), otherAt);
  }

  /**
   * The scale of about `factor` times the size, different from the current one where there is another.
   *
   * @param {number} factor
   */
  times(factor) {
    const { lead } = this;
    const to = lead.nearest(lead.pixels * factor);
    return to === lead.at ? lead.at + Math.sign(factor - 1) : to;
  }

  /** The part in sight, as an address holds it; null for the whole. */
  get address() {
    return this.whole ? null : [this.down, this.across].flatMap((axis) => {
      const first = Math.round(axis.offset / axis.cell) * axis.per;
      return [first, Math.min(axis.count, first + Math.floor(axis.room / axis.cell) * axis.per)];
    }).join(".");
  }

  /** @param {string | null} address */
  show(address) {
    const [top, bottom, left, right] = address === null
      ? [0, this.down.count, 0, this.across.count] : address.split(".").map(Number);
    this.down.show(Math.min(top, this.down.count - 1), bottom);
    this.across.show(Math.min(left, this.across.count - 1), right);
  }

  /**
   * The query and the key under a point in CSS pixels of the canvas: null beside the picture on that side.
   *
   * @param {number} x
   * @param {number} y
   * @returns {Pair}
   */
  pointAt(x, y) {
    const [right, below] = [x * this.ratio - this.left, y * this.ratio - this.top];
    /**
     * @param {Axis} axis
     * @param {number} pixel
     */
    const within = (axis, pixel) => pixel >= 0 && pixel < axis.room;
    const column = within(this.across, right);
    const row = within(this.down, below);
    return {
      i: row && (column || right >= 0) ? this.down.tokenAt(below) : null,
      j: column && (row || (below < 0 && below >= this.words - this.top)) ? this.across.tokenAt(right) : null,
    };
  }
}

/**
 * The strongest pair of a cell, which is the pair the cell's colour shows; the first if none is allowed.
 *
 * @param {Head} head
 * @param {FullPair} given
 * @param {number} perRow
 * @param {number} perColumn
 */
export function strongestIn(head, { i: row, j: column }, perRow, perColumn) {
  let best = { i: row, j: column, weight: -1 };
  const right = Math.min(head.keys, column + perColumn);
  const weights = new Float64Array(perColumn);
  for (let i = row; i < Math.min(head.queries, row + perRow); i++) {
    const from = Math.max(column, head.start[i]);
    const to = Math.min(right, head.stop[i]);
    weightsOf(head, i, from, to, weights);
    for (let j = from; j < to; j++) if (weights[j - from] > best.weight) best = { i, j, weight: weights[j - from] };
  }
  return best;
}

/**
 * Positions worth a tick: round steps at least `apart` pixels from each other.
 *
 * @param {Axis} axis
 * @param {number} apart
 */
export function ticksOf(axis, apart) {
  const least = (apart / axis.cell) * axis.per;
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4].find((each) => each >= least) ?? 5e4;
  const [first, last] = axis.seen;
  const ticks = [];
  for (let index = Math.ceil(first / step) * step; index < last; index += step) ticks.push(index);
  return ticks;
}
