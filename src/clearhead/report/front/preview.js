// ---- Small maps of heads: the largest weight of each cell, as times uniform.

import { make, penOf } from "../../base/front/dom.js";
import { channels } from "../../base/front/ramp.js";
import { Scale } from "./colour.js";
import { figureWords } from "./measures.js";

/**
 * @import { HeadsPane } from "./heads.js"
 * @import { HeadAt, HeadPlace, PageOfHeads } from "./types.d.ts"
 */

/**
 * Draws a head's small map; masked cells have a colour of their own.
 *
 * @param {PageOfHeads} given
 * @param {HeadAt} given
 * @param {HTMLCanvasElement} canvas
 */
export async function drawThumbnail({ run, theme }, { layer: number, head }, canvas) {
  const layer = run.layers[number];
  if (!layer.thumbnail || !run.array) return; // a survey has none
  const { block, rows, columns } = layer.thumbnail;
  const wanted = `${number}.${head} ${theme.dark}`;
  if (canvas.dataset.drawn === wanted) return;
  canvas.dataset.drawn = wanted;
  const codes = (await run.array(block)).subarray(head * rows * columns, (head + 1) * rows * columns);
  if (canvas.dataset.drawn !== wanted) return;
  const scale = new Scale("uniform", layer.keys, theme.dark);
  const masked = channels(theme.colours.hatch);
  const colours = Array.from({ length: 256 }, (_, code) => {
    const step = 3 * scale.step(2 ** (((code - 128) / 127) * 8));
    return code === 0 ? masked : scale.table.subarray(step, step + 3);
  });
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows);
  codes.forEach((code, cell) => image.data.set([...colours[code], 255], 4 * cell));
  penOf(canvas).putImageData(image, 0, 0);
}

/** The small map and the measure of the head that is pointed at, beside the pane and never over it. */
export class HeadPreview {
  /** @param {HeadsPane} pane */
  constructor(pane) {
    this.pane = pane;
    this.box = pane.page.find("preview");
    this.canvas = make("canvas");
    this.title = make("strong");
    this.words = make("span");
    this.box.append(this.title, this.canvas, this.words);
  }

  /** @param {HeadPlace | null} place */
  show(place) {
    const { page } = this.pane;
    this.box.hidden = place === null;
    if (place === null) return;
    this.title.textContent = `${place.name} ${page.run.layers[place.layer].name}`;
    this.words.textContent = this.pane.measure ? figureWords(this.pane.measure, this.pane.figure(place)) : "";
    this.canvas.hidden = page.run.layers[place.layer].thumbnail === undefined;
    if (!this.canvas.hidden) drawThumbnail(page, place, this.canvas);
    const pane = page.find("overview");
    const [outer, cell] = [pane, place.element].map((element) => element.getBoundingClientRect());
    const { width } = page.host.getBoundingClientRect();
    const wide = this.box.offsetWidth + 8;
    const right = outer.right + wide <= width;
    const beside = right || outer.left >= wide;
    const below = page.find("heads").getBoundingClientRect().bottom;
    const left = right ? outer.width + 6 : beside ? -wide : Math.max(0, (outer.width - wide) / 2);
    this.box.style.left = `${left}px`;
    const top = Math.min(cell.top - 40, window.innerHeight - this.box.offsetHeight - 8);
    this.box.style.top = `${(beside ? Math.max(8, top) : below + 6) - outer.top}px`;
  }
}
