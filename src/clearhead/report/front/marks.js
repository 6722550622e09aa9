// ---- Drawings around the map: bars, words, and the marks of a pair.

import { axisLabel, BARS, labelSigns, SMALLEST_LABELLED, ticksOf } from "./layout.js";
import { countsOf } from "./weights.js";
import { shortened } from "./words.js";

/**
 * @import { Colours } from "../../base/front/theme.js"
 * @import { Axis, Layout } from "./layout.js"
 * @import { Afar, LabelStyle, Names, Pair, Shown, Sketch, Word } from "./types.d.ts"
 */

const SIDES = /** @type {const} */ (["down", "across"]);
const OCTAVES = [4, 3]; // the bars above reach to 2^4 and 2^-3 times uniform
export const SMALL = "px system-ui, sans-serif";

/**
 * The weight that each key receives, as a multiple of uniform attention's under the same mask; else of the average key's.
 *
 * @param {Afar} head
 * @returns {Float64Array}
 */
export function receivedRatios(head) {
  if (!head.ratios) {
    const seeing = Array.from(countsOf(head)).filter((count) => count > 0).length;
    const average = seeing / head.keys;
    const { expected } = head;
    head.ratios = Float64Array.from(head.received ?? [], (sum, j) => sum / (expected ? expected[j] : average));
  }
  return head.ratios;
}

/**
 * The entropy of each query over uniform attention's entropy; null where the data does not have it.
 *
 * @param {Afar} head
 * @returns {Float64Array | null}
 */
export function evenness(head) {
  if (!head.evenness && head.entropy) {
    const counts = countsOf(head);
    head.evenness = Float64Array.from(head.entropy, (nats, i) => (counts[i] > 1 ? nats / Math.log(counts[i]) : NaN));
  }
  return head.evenness ?? null;
}

/**
 * Calls `show(start, size, value)` for each cell of an axis in sight: the largest or the mean of its tokens' numbers.
 *
 * @param {Axis} axis
 * @param {Float64Array} numbers
 * @param {boolean} mean
 * @param {(start: number, size: number, value: number) => void} show
 */
function eachCell(axis, numbers, mean, show) {
  const [first, last] = axis.seen;
  for (let token = first; token < last; token += axis.per) {
    let most = -Infinity;
    let sum = 0;
    let count = 0;
    for (let each = token; each < Math.min(axis.count, token + axis.per); each++) {
      if (numbers[each] !== numbers[each]) continue;
      most = Math.max(most, numbers[each]);
      sum += numbers[each];
      count++;
    }
    if (!count) continue;
    const from = Math.max(0, axis.startOf(token));
    show(from, Math.min(axis.room, axis.startOf(token) + axis.cell) - from, mean ? sum / count : most);
  }
}

/**
 * The bars: above the map the weight that each key receives, to its right how even the weights of each query are.
 *
 * @param {CanvasRenderingContext2D} pen
 * @param {Shown | Sketch} given
 * @param {Layout} layout
 * @param {boolean} mean
 * @param {Colours} colours
 */
export function drawBars(pen, { head }, layout, mean, colours) {
  const { left, top, across, down, unit } = layout;
  const room = Math.round((BARS - 4) * unit);
  const octave = room / (OCTAVES[0] + OCTAVES[1]);
  const base = top - Math.round(2 * unit) - Math.round(OCTAVES[1] * octave);
  const cap = Math.max(1, Math.round(2 * unit));
  /** @param {Axis} axis */
  const gap = (axis) => (axis.cell > 3 * unit ? Math.round(unit) : 0);
  eachCell(across, receivedRatios(head), mean, (x, size, value) => {
    const wanted = Math.log2(value);
    const octaves = Math.min(OCTAVES[0], Math.max(-OCTAVES[1], wanted));
    const tall = Math.round(Math.abs(octaves) * octave);
    const wide = Math.max(1, size - gap(across));
    pen.fillStyle = octaves > 0 ? colours.bar : colours.quiet;
    pen.fillRect(left + x, octaves > 0 ? base - tall : base, wide, tall);
    if (wanted === octaves) return;
    pen.fillStyle = colours.ink; // cut
    pen.fillRect(left + x, octaves > 0 ? base - tall : base + tall - cap, wide, cap);
  });
  pen.fillStyle = colours.quiet;
  pen.fillRect(left, base, across.room, Math.max(1, Math.round(unit / 2)));
  const even = evenness(head);
  const edge = left + across.room + Math.round(3 * unit);
  const wide = layout.right - Math.round(4 * unit);
  if (even) {
    pen.fillStyle = colours.bar;
    eachCell(down, even, mean, (y, size, value) => {
      pen.fillRect(edge, top + y, Math.max(1, Math.round(value * wide)), Math.max(1, size - gap(down)));
    });
    pen.fillStyle = colours.line;
    pen.fillRect(edge + wide, top, Math.max(1, Math.round(unit)), down.room); // uniform
  }
  pen.font = `${Math.round(10 * unit)}${SMALL}`;
  pen.fillStyle = colours.quiet;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const space = left - 6 * unit;
  pen.fillText("received", left - 4 * unit, base - 15 * unit, space);
  pen.fillText("÷ uniform", left - 4 * unit, base - 3 * unit, space);
  if (even) pen.fillText("entropy", layout.width - unit, top - 8 * unit, wide + 2 * unit);
}

/**
 * Whether each token of an axis has its word.
 *
 * @param {Axis} axis
 * @param {number} unit
 */
export const hasWords = (axis, unit) => axis.per === 1 && axis.cell >= SMALLEST_LABELLED * unit;

/**
 * The tokens that get a label on an axis.
 *
 * @param {Axis} axis
 * @param {number} unit
 * @param {number} apart
 */
export function labelled(axis, unit, apart) {
  if (!hasWords(axis, unit)) return ticksOf(axis, apart * unit);
  const [first, last] = axis.seen;
  return Array.from({ length: last - first }, (_, at) => first + at);
}

/**
 * Writes beside the rows, or above the columns: at the middle of a cell. `ground`: painted under the word.
 *
 * @param {CanvasRenderingContext2D} pen
 * @param {Layout} layout
 * @param {"down" | "across"} side
 * @param {string} text
 * @param {number} index
 * @param {LabelStyle} given
 */
function writeLabel(pen, layout, side, text, index, { ink, ground, bold, turned }) {
  const { left, words, unit } = layout;
  const axis = layout[side];
  const middle = axis.startOf(index) + axis.cell / 2;
  if (middle < 0 || middle > axis.room) return;
  pen.save();
  pen.font = `${bold ? "600 " : ""}${Math.round(11 * unit)}${SMALL}`;
  pen.textBaseline = "middle";
  const gap = Math.round(4 * unit);
  if (side === "down") pen.translate(left - gap, layout.top + middle);
  else {
    pen.translate(left + middle, words - gap);
    if (turned) pen.rotate(-Math.PI / 2);
  }
  const across = side === "across" && !turned;
  pen.textAlign = side === "down" ? "right" : turned ? "left" : "center";
  const room = (side === "down" ? left : words) - 2 * gap;
  if (ground) {
    const wide = Math.min(room, pen.measureText(text).width) + 2 * gap;
    const tall = hasWords(axis, unit) ? Math.min(axis.cell, Math.round(15 * unit)) : Math.round(15 * unit);
    pen.fillStyle = ground;
    pen.fillRect(side === "down" ? gap - wide : across ? -wide / 2 : -gap, -tall / 2, wide, tall);
  }
  pen.fillStyle = ink;
  pen.fillText(text, 0, across ? -gap : 0, across ? 12 * gap : room);
  pen.restore();
}

/** CSS pixels between the middles of two positions that are written on an axis. */
const APART = { down: 30, across: 46 };

/**
 * Paints the ground over the positions on an axis that a word at `index` would cover in part, such as the 8 of 80.
 *
 * @param {CanvasRenderingContext2D} pen
 * @param {Layout} layout
 * @param {"down" | "across"} side
 * @param {number} index
 * @param {string} ground
 */
function clearBeside(pen, layout, side, index, ground) {
  const { left, top, words, unit } = layout;
  const axis = layout[side];
  if (hasWords(axis, unit)) return;
  const half = 8 * unit; // of a line of letters
  pen.font = `${Math.round(11 * unit)}${SMALL}`;
  pen.fillStyle = ground;
  for (const tick of labelled(axis, unit, APART[side])) {
    const wide = pen.measureText(String(tick)).width + 4 * unit;
    const apart = axis.startOf(tick) - axis.startOf(index);
    const middle = axis.startOf(tick) + axis.cell / 2;
    if (side === "down" && Math.abs(apart) < 2 * half) pen.fillRect(left - wide - 2 * unit, top + middle - half, wide, 2 * half);
    if (side === "across" && Math.abs(apart) < half + wide / 2) {
      pen.fillRect(left + middle - wide / 2, words - 18 * unit, wide, 17 * unit);
    }
  }
}

/**
 * The name of a token on an axis: its word, or its position.
 *
 * @param {Word[]} words
 * @param {number} index
 * @param {Layout} layout
 */
function labelOf(words, index, layout) {
  return shortened(axisLabel(words[index]), labelSigns(words, layout.width / layout.ratio));
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {{ names: Names }} given
 * @param {Layout} layout
 * @param {Colours} colours
 * @param {string[]} [only] the colours of words that one of two texts alone has
 */
export function drawLabels(pen, { names }, layout, colours, only = []) {
  SIDES.forEach((side, at) => {
    const axis = layout[side];
    const turned = side === "across" && hasWords(axis, layout.unit);
    for (const index of labelled(axis, layout.unit, APART[side])) {
      const text = hasWords(axis, layout.unit) ? labelOf(names[at], index, layout) : String(index);
      writeLabel(pen, layout, side, text, index, { ink: only[names[at][index].only ?? 2] ?? colours.quiet, turned });
    }
  });
}

/**
 * Draws the words and the places of a pair in the margins and around the picture, and nothing over other cells.
 *
 * @param {CanvasRenderingContext2D} pen
 * @param {{ names: Names }} given
 * @param {Pair} pair
 * @param {Layout} layout
 * @param {Colours} colours
 */
export function drawCross(pen, { names }, pair, layout, colours) {
  const { left, top, across, down, unit } = layout;
  const thick = Math.max(1, Math.round(1.5 * unit));
  const bar = Math.round(4 * unit);
  pen.fillStyle = colours.accent;
  const spots = SIDES.map((side, at) => {
    const index = at === 0 ? pair.i : pair.j;
    if (index === null) return null;
    const axis = layout[side];
    const start = axis.startOf(index);
    const from = Math.max(0, start);
    const size = Math.min(axis.room, start + axis.cell) - from;
    if (size <= 0) return null;
    const least = Math.max(size, 2 * thick);
    const begin = from - (least - size) / 2;
    if (side === "down") {
      pen.fillRect(left - bar, top + begin, bar - 1, least);
      pen.fillRect(left + across.room + 1, top + begin, layout.width - left - across.room, thick);
      pen.fillRect(left + across.room + 1, top + begin + least - thick, layout.width - left - across.room, thick);
    } else {
      pen.fillRect(left + begin, layout.words, thick, top - layout.words - 1);
      pen.fillRect(left + begin + least - thick, layout.words, thick, top - layout.words - 1);
      pen.fillRect(left + begin, top + down.room + 1, least, layout.height - top - down.room);
    }
    const word = labelOf(names[at], index, layout);
    const text = names[at][index].repeated && !hasWords(axis, unit) ? `${word} ${index}` : word;
    const style = { ink: colours.accent, ground: colours.panel, bold: true, turned: side === "across" };
    clearBeside(pen, layout, side, index, colours.panel);
    writeLabel(pen, layout, side, text, index, style);
    pen.fillStyle = colours.accent;
    return [from, size];
  });
  if (!spots[0] || !spots[1] || Math.min(across.cell, down.cell) < 6 * unit) return;
  const [[y, tall], [x, wide]] = spots; // around a cell that is large enough to be framed
  pen.fillRect(left + x - thick, top + y - thick, wide + 2 * thick, thick);
  pen.fillRect(left + x - thick, top + y + tall, wide + 2 * thick, thick);
  pen.fillRect(left + x - thick, top + y, thick, tall);
  pen.fillRect(left + x + wide, top + y, thick, tall);
}
