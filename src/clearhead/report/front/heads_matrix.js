// ---- The matrix of heads: layers down, heads across, one square a head. It always fits its pane's width.

import { closestTo, everyIn, firstIn, make, revealIn } from "../../base/front/dom.js";
import { cssColour, inkOn } from "../../base/front/ramp.js";
import { stepTo } from "./keys.js";
import { keyOf, limitOf } from "./measures.js";
import { roleOf, rowName } from "./names.js";
import { drawThumbnail, HeadPreview } from "./preview.js";
import { signedStep, signedTables } from "./signed.js";

/**
 * @import { HeadsPane } from "./heads.js"
 * @import { HeadPlace } from "./types.d.ts"
 */

/** @type {Record<string, string>} */
const GROUP_TITLES = { encoder: "Encoder", decoder: "Decoder", cross: "Cross attention", self: "Self attention" };

/**
 * Squares for `count` heads in `room` pixels: how many stand in a line, and how large they are. Where they would be
 * smaller than `least`, a layer takes several lines.
 *
 * @param {number} count
 * @param {number} room
 * @param {number} least
 * @param {number} most
 * @returns {{ columns: number, size: number, gap: number }}
 */
function squaresIn(count, room, least, most) {
  for (const gap of [1, 0]) {
    const size = Math.floor((room - gap * (count - 1)) / count);
    if (size >= least) return { columns: count, size: Math.min(size, most), gap };
  }
  const lines = Math.ceil(count / Math.max(1, Math.floor((room + 1) / (least + 1))));
  return squaresIn(Math.ceil(count / lines), room, Math.min(least, room), most);
}

export class HeadMatrix {
  /** @param {HeadsPane} pane */
  constructor(pane) {
    this.pane = pane;
    const { page } = pane;
    this.box = page.find("heads");
    this.preview = new HeadPreview(pane);
    /** @type {HTMLElement[]} */
    this.cells = [];
    /** @type {{ grid: HTMLElement, heading: HTMLElement, most: number, own: HeadPlace[] }[]} */
    this.grids = [];
    this.drawn = ""; // the state that was drawn
    this.maps = false;
    for (const role of new Set(page.run.layers.map(roleOf))) this.build(role);
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.box.addEventListener("click", (event) => {
      const place = this.at(event);
      if (place) pane.open(place);
    });
    this.box.addEventListener("pointerover", (event) => {
      if (event.pointerType !== "touch") this.preview.show(this.at(event));
    });
    this.box.addEventListener("pointerleave", () => this.preview.show(null));
    this.box.addEventListener("focusin", (event) => {
      if (closestTo(event.target, ".head")?.matches(":focus-visible")) this.preview.show(this.at(event));
    });
    this.box.addEventListener("focusout", () => this.preview.show(null));
  }

  /** @param {Event} event */
  at(event) {
    const cell = closestTo(event.target, ".head");
    return cell ? this.pane.places[Number(cell.dataset.place)] : null;
  }

  /**
   * The grid of one role: a line of numbers, and a row for each layer.
   *
   * @param {string} role
   */
  build(role) {
    const { page, places } = this.pane;
    const { layers } = page.run;
    const grid = make("div", "grid");
    grid.setAttribute("role", "grid");
    grid.setAttribute("aria-label", `heads, ${role}: a row for each layer`);
    const own = places.filter(({ layer }) => roleOf(layers[layer]) === role);
    const heading = make("div", "numbers");
    heading.setAttribute("aria-hidden", "true");
    grid.append(heading);
    let row = { layer: -1, element: make("div"), squares: make("div") };
    for (const place of own) {
      if (row.layer !== place.layer) {
        row = { layer: place.layer, element: make("div", "row"), squares: make("div", "squares") };
        row.element.setAttribute("role", "row");
        row.squares.setAttribute("role", "presentation");
        const label = make("span", "number", rowName(page.labels[place.layer]));
        label.setAttribute("role", "rowheader");
        label.title = layers[place.layer].name;
        row.element.append(label, row.squares);
        grid.append(row.element);
      }
      const cell = place.element;
      cell.setAttribute("role", "gridcell");
      cell.tabIndex = -1;
      cell.dataset.place = String(places.indexOf(place));
      row.squares.append(cell);
      this.cells.push(cell);
    }
    const most = own.reduce((count, { layer }) => Math.max(count, layers[layer].heads.length), 0);
    const widest = own.reduce((count, { layer }) => Math.max(count, rowName(page.labels[layer]).length), 0);
    grid.style.setProperty("--label", `${Math.min(widest + 1, 13)}ch`);
    this.grids.push({ grid, heading, most, own });
    this.box.append(make("h3", "", role.replace(/^\w+/, (own) => GROUP_TITLES[own] ?? own)), grid);
  }

  paint() {
    const { view, theme, host } = this.pane.page;
    const wanted = [this.pane.measure, view.show, view.only, view.pins, view.all, theme.dark, host.clientWidth, host.hasAttribute("data-large")].join();
    if (this.drawn !== wanted) {
      this.maps = view.show === "maps";
      this.fit();
      this.fit(); // the first may have made or unmade a scrollbar
      this.colour();
    }
    this.drawn = wanted;
    this.mark();
  }

  fit() {
    const larger = this.pane.page.host.hasAttribute("data-large") ? 1.4 : 1;
    for (const { grid, heading, most, own } of this.grids) {
      const room = this.box.clientWidth - 8 - firstIn(grid, ".number", HTMLElement).offsetWidth;
      const { columns, size, gap } = squaresIn(most, room, this.maps ? 24 : 6, (this.maps ? 72 : 26) * larger);
      grid.style.setProperty("--size", `${size}px`);
      grid.style.setProperty("--gap", `${gap}px`);
      grid.style.setProperty("--columns", String(columns));
      heading.hidden = columns < most; // several lines a layer
      const every = [1, 2, 4, 8, 16].find((step) => step * (size + gap) >= (columns > 10 ? 28 : 20) * larger) ?? 32;
      const layer = this.pane.page.run.layers[own[0].layer];
      heading.replaceChildren(...layer.heads.slice(0, columns).map(({ number }, head) => (
        make("span", "", head % every ? "" : `H${number ?? head}`))));
    }
  }

  colour() {
    const { pane } = this;
    const table = signedTables[pane.page.theme.dark ? "dark" : "light"];
    const limit = limitOf(pane.measure, pane.places.map((place) => pane.figure(place)));
    for (const place of pane.places) {
      const { element } = place;
      const figure = pane.figure(place);
      const step = signedStep((figure?.departs ?? 0) / limit);
      element.style.backgroundColor = figure && !this.maps ? cssColour(table, step) : "";
      element.style.color = this.maps ? "" : inkOn(table, step);
      element.classList.toggle("unknown", figure === null && !this.maps);
      element.classList.toggle("dim", !pane.shown.has(place));
      element.classList.toggle("pinned", pane.pinned.has(keyOf(place)));
      element.setAttribute("aria-label", pane.words(place));
      if (!this.maps) {
        element.replaceChildren();
        continue;
      }
      const canvas = everyIn(element, "canvas", HTMLCanvasElement)[0] ?? make("canvas");
      if (!element.firstChild) element.append(canvas);
      drawThumbnail(pane.page, place, canvas);
    }
  }

  /** The chosen head has the mark, and receives the focus of the Tab key. */
  mark() {
    const { layer, head } = this.pane.page.view;
    for (const place of this.pane.places) {
      const chosen = place.layer === layer && place.head === head;
      place.element.tabIndex = chosen ? 0 : -1;
      if (chosen) {
        if (!place.element.hasAttribute("aria-current")) revealIn(this.box, place.element);
        place.element.setAttribute("aria-current", "true");
      } else place.element.removeAttribute("aria-current");
    }
  }

  /** @param {KeyboardEvent} event */
  move(event) {
    const from = this.cells.findIndex((cell) => cell === this.pane.page.root.activeElement);
    if (from < 0) return;
    if (event.key === "Escape") this.preview.show(null);
    const chosen = event.key === "Enter" || event.key === " ";
    const to = chosen ? from : stepTo(event.key, from, this.cells);
    if (to < 0) return;
    event.preventDefault();
    for (const cell of this.cells) cell.tabIndex = -1;
    this.cells[to].tabIndex = 0;
    this.cells[to].focus();
    const place = chosen && this.at(event);
    if (place) this.pane.open(place);
  }
}
