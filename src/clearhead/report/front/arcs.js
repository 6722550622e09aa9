// ---- The strongest weights as arcs over the text, from the token that looks to the token looked at.

import { draw } from "../../base/front/dom.js";
import { percent } from "./words.js";

/**
 * @import { Prose } from "./prose.js"
 * @import { Direction, Meeting, WeightedPair } from "./types.d.ts"
 */

export const ARCS = 5;

/**
 * Adds a pair [weight, query, key] to the ordered list of the strongest ARCS pairs. Equal weights keep their order.
 *
 * @param {WeightedPair[]} strongest
 * @param {number} weight
 * @param {number} i
 * @param {number} j
 */
export function keepStrongest(strongest, weight, i, j) {
  if (!(weight > 0) || (strongest.length === ARCS && weight <= strongest[ARCS - 1][0])) return;
  let at = strongest.length;
  while (at > 0 && strongest[at - 1][0] < weight) at--;
  strongest.splice(at, 0, [weight, i, j]);
  strongest.length = Math.min(strongest.length, ARCS);
}

/**
 * The pairs that are drawn: those with at least a hundredth of the largest weight, since a thinner line says nothing.
 *
 * @param {WeightedPair[]} strongest
 */
export const worthDrawing = (strongest) => strongest.filter(([weight]) => weight >= strongest[0][0] / 100);

/**
 * The place where an arc meets a token: the token's box within `over`. A token out of sight has `off`, and a place at the
 * edge of its text.
 *
 * @param {Prose} prose
 * @param {number} index
 * @param {DOMRect} over
 */
function meetingOf(prose, index, over) {
  const box = prose.element.getBoundingClientRect();
  const shown = prose.spans[index]?.getClientRects()[0];
  const before = shown ? shown.top < box.top : index < prose.spans.findIndex(Boolean);
  const off = shown && shown.bottom <= box.bottom && !before ? "" : before ? "↑" : "↓";
  const x = shown ? shown.left + shown.width / 2 : box.left + box.width / 2;
  const [top, bottom] = off === "" ? [shown.top, shown.bottom] : off === "↑" ? [box.top, box.top] : [box.bottom, box.bottom];
  return { x: x - over.left, top: top - over.top, bottom: bottom - over.top, off };
}

/**
 * The path of an arc, and the possible places of its label: above or below the end that is not the chosen token.
 *
 * @param {Meeting} from
 * @param {Meeting} to
 * @param {Meeting} labelled
 */
function arcBetween(from, to, labelled) {
  const other = labelled === from ? to : from;
  if (Math.abs(from.top - to.top) < 6) {
    const rise = Math.min(24, 9 + 0.06 * Math.abs(from.x - to.x));
    const path = `M${from.x} ${from.top}C${from.x} ${from.top - rise} ${to.x} ${to.top - rise} ${to.x} ${to.top}`;
    return { path, x: labelled.x, y: [labelled.top - 4, labelled.bottom + 11] };
  }
  const down = to.top > from.top;
  const [y1, y2] = down ? [from.bottom, to.top] : [from.top, to.bottom];
  const bend = Math.max(12, Math.abs(y2 - y1) / 2) * (down ? 1 : -1);
  const path = `M${from.x} ${y1}C${from.x} ${y1 + bend} ${to.x} ${y2 - bend} ${to.x} ${y2}`;
  const sides = [labelled.top - 4, labelled.bottom + 11];
  return { path, x: labelled.x, y: labelled.top > other.top ? sides : sides.reverse() };
}

/**
 * Draws arcs on `svg`, which lies over the texts. `pairs`: [weight, query, key]; `view`: which end is chosen.
 *
 * @param {SVGSVGElement} svg
 * @param {WeightedPair[]} pairs
 * @param {Direction} view
 * @param {(side: "query" | "key") => Prose} proseOf
 */
export function drawArcs(svg, pairs, view, proseOf) {
  const over = svg.getBoundingClientRect();
  /** @type {[number, number][]} */
  const taken = []; // places of labels that are taken
  svg.replaceChildren();
  const labels = pairs.map(([weight, i, j], number) => {
    const from = meetingOf(proseOf("query"), i, over);
    const to = meetingOf(proseOf("key"), j, over);
    const end = view === "out" ? to : from;
    if (from.off && to.off) return "";
    if (end.off) end.x += (number - (pairs.length - 1) / 2) * 52; // ends out of sight stand side by side
    if (i === j && from.top === to.top) {
      from.x -= 5;
      to.x += 5;
    }
    const { path, x, y } = arcBetween(from, to, end);
    svg.append(draw("path", { d: path, "stroke-width": (1.2 + 4 * weight).toFixed(2) }),
      draw("circle", { cx: to.x, cy: path.endsWith(` ${to.top}`) ? to.top : to.bottom, r: 2.6 }));
    const wide = Math.max(22, Math.min(over.width - 22, x));
    const rows = [...y, y[0] - 11, y[1] + 11].map((row) => Math.max(10, Math.min(over.height - 3, row)));
    /** @param {number} row */
    const free = (row) => !taken.some(([a, b]) => Math.abs(a - wide) < 40 && Math.abs(b - row) < 11);
    const high = rows.find(free);
    if (high === undefined) return ""; // over another label neither could be read, and the sentence below says both
    taken.push([wide, high]);
    return draw("text", { x: wide, y: high }, `${end.off}${percent(weight)}`);
  });
  svg.append(...labels.filter(Boolean));
}
