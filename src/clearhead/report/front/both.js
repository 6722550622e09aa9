// ---- The two sides of a comparison: the text of each, shaded by the current query's weights, and the map of each.

import { make, penOf } from "../../base/front/dom.js";
import { channels } from "../../base/front/ramp.js";
import { haveKey, haveQuery, inText, mayBeside, weightBeside } from "./difference.js";
import { breathe, countsOf, equalShare } from "./weights.js";
import { nameOf } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Compared, Frame, FullPair, Head, Side, SideMap } from "./types.d.ts"
 */

const MOST_PAIRS = 2 ** 22; // of longer texts every second, third, … query is in the maps, as in the map of differences
const WIDE = 150; // so many tokens before and after the query are shown of a long text
const MAP = 360; // CSS pixels of a map

/**
 * A side's weight of a pair, by its place in the compared texts; NaN where the side's text does not have it. `head`: the first
 * head of the comparison, under whose mask uniform attention is.
 *
 * @param {Side} side
 * @param {Head} head
 * @param {number} i
 * @param {number} j
 */
export function weightIn({ heads }, head, i, j) {
  const own = heads.length ? heads : [head];
  if (!haveQuery(own, i) || !haveKey(own, j)) return NaN;
  if (!own.every((one) => mayBeside(one, i, j))) return 0;
  return meanWeight({ heads }, head, i, j);
}

/**
 * The same of a pair that the side's text has and no mask hides.
 *
 * @param {Pick<Side, "heads">} side
 * @param {Head} head
 * @param {number} i
 * @param {number} j
 */
function meanWeight({ heads }, head, i, j) {
  if (!heads.length) return equalShare(head, inText(head.rows, i));
  return heads.reduce((sum, one) => sum + weightBeside(one, i, j), 0) / heads.length;
}

/**
 * The maps of both sides, in cells of `perRow` × `perColumn` pairs; null when `wanted()` turns false.
 *
 * @param {[Side, Side]} sides
 * @param {Frame} frame
 * @param {number} perRow
 * @param {number} perColumn
 * @param {() => boolean} wanted
 * @returns {Promise<SideMap[] | null>}
 */
export async function mapsOf(sides, { queries, keys }, perRow, perColumn, wanted) {
  const heads = sides.flatMap((side) => side.heads);
  const step = Math.ceil((queries * keys * heads.length) / 2 / MOST_PAIRS);
  const columns = Math.ceil(keys / perColumn);
  const cells = Math.ceil(queries / perRow) * columns;
  const maps = sides.map(() => ({ plain: new Float32Array(cells).fill(NaN), relative: new Float32Array(cells).fill(NaN) }));
  let since = performance.now();
  for (let i = 0; i < queries; i += step) {
    for (const [number, side] of sides.entries()) {
      const own = side.heads.length ? side.heads : [heads[0]];
      if (!haveQuery(own, i)) continue;
      const count = countsOf(own[0])[inText(own[0].rows, i)];
      for (let j = 0; j < keys; j++) {
        if (!haveKey(own, j) || !own.every((head) => mayBeside(head, i, j))) continue;
        const weight = meanWeight(side, heads[0], i, j);
        const cell = Math.floor(i / perRow) * columns + Math.floor(j / perColumn);
        const { plain, relative } = maps[number];
        if (!(weight <= plain[cell])) plain[cell] = weight;
        if (!(weight * count <= relative[cell])) relative[cell] = weight * count;
      }
    }
    if (performance.now() - since < 30) continue;
    await breathe();
    if (!wanted()) return null;
    since = performance.now();
  }
  return maps;
}

export class Both {
  /**
   * @param {Page} page
   * @param {(pair: FullPair) => void} take
   */
  constructor(page, take) {
    this.page = page;
    /** @type {Compared | null} */
    this.made = null;
    this.parts = [0, 1].map(() => {
      const [part, title, text, canvas] = [make("div"), make("h3"), make("p", "shaded"), make("canvas")];
      canvas.setAttribute("role", "img");
      canvas.addEventListener("click", ({ offsetX, offsetY }) => {
        if (!this.made) return;
        const { frame: { queries, keys }, layout: { down, across } } = this.made;
        const row = Math.floor((offsetY / canvas.clientHeight) * down.cells);
        const column = Math.floor((offsetX / canvas.clientWidth) * across.cells);
        take({ i: Math.min(queries - 1, row * down.per), j: Math.min(keys - 1, column * across.per) });
      });
      part.append(title, text, canvas);
      page.find("both").append(part);
      return { title, text, canvas };
    });
  }

  /**
   * @param {Compared} made
   * @param {FullPair | null} pair
   */
  draw(made, pair) {
    this.made = made;
    made.sides.forEach((side, number) => {
      this.write(number, side, pair);
      this.picture(number, side.name, pair);
    });
  }

  /**
   * The keys' text of a side, shaded by the weights of a query.
   *
   * @param {number} number
   * @param {Side} side
   * @param {FullPair | null} pair
   */
  write(number, side, pair) {
    const { page } = this;
    const { head, frame, names } = /** @type {Compared} */ (this.made);
    const { title, text } = this.parts[number];
    const [own] = side.heads.length ? side.heads : [head];
    const query = pair && inText(own.rows, pair.i);
    title.textContent = !pair ? side.name
      : `${side.name}: ${query === null || query < 0 ? `its text lacks “${nameOf(names[0], pair.i)}”` : `where “${nameOf(page.texts[own.layer.queryText], query)}” looks`}`;
    const { scale } = page.now;
    const words = page.texts[own.layer.keyText];
    const middle = Math.max(0, pair ? inText(own.columns, pair.j) : 0);
    const [from, to] = [Math.max(0, middle - WIDE), Math.min(words.length, middle + WIDE)];
    /** @type {Map<number, number>} the weights of the words by their places in this text */
    const weights = new Map();
    for (let j = 0; pair && query !== null && query >= 0 && j < frame.keys; j++) {
      const place = inText(own.columns, j);
      if (place >= from && place < to) weights.set(place, weightIn(side, head, pair.i, j));
    }
    const count = query !== null && query >= 0 ? countsOf(own)[query] : 0;
    text.replaceChildren(from > 0 ? "… " : "");
    for (let at = from; at < to; at++) {
      if (words[at].gap && at > from) text.append(" ");
      const span = make("span", "", words[at].prose);
      const weight = weights.get(at) ?? 0;
      if (weight * count > 1) {
        const step = scale.step(scale.value(weight, count));
        span.style.backgroundColor = scale.css(step);
        span.style.color = scale.ink(step);
      }
      if (at === query && own.layer.queryText === own.layer.keyText) span.className = "chosen";
      text.append(span);
    }
    if (to < words.length) text.append(" …");
  }

  /**
   * The map of a side, with a frame around a pair.
   *
   * @param {number} number
   * @param {string} name
   * @param {FullPair | null} pair
   */
  picture(number, name, pair) {
    const { page } = this;
    const { layout: { down, across }, maps } = /** @type {Compared} */ (this.made);
    const { canvas } = this.parts[number];
    const { scale } = page.now;
    const values = scale.relative ? maps[number].relative : maps[number].plain;
    const image = new ImageData(across.cells, down.cells);
    const none = channels(page.theme.colours.hatch);
    values.forEach((value, cell) => {
      const step = 3 * scale.step(value);
      image.data.set([...(value === value ? scale.table.subarray(step, step + 3) : none), 255], 4 * cell);
    });
    const small = Object.assign(document.createElement("canvas"), { width: across.cells, height: down.cells });
    penOf(small).putImageData(image, 0, 0);
    const size = Math.max(1, Math.floor((MAP * (window.devicePixelRatio || 1)) / Math.max(across.cells, down.cells)));
    Object.assign(canvas, { width: size * across.cells, height: size * down.cells });
    canvas.style.aspectRatio = `${across.cells} / ${down.cells}`;
    const pen = penOf(canvas);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, canvas.width, canvas.height);
    canvas.setAttribute("aria-label", `the weights of ${name}`);
    if (!pair) return;
    pen.strokeStyle = page.theme.colours.accent;
    pen.lineWidth = Math.max(1, Math.min(3, size / 4));
    pen.strokeRect(size * Math.floor(pair.j / across.per), size * Math.floor(pair.i / down.per), size, size);
  }
}
