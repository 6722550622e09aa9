// ---- The picture of a head in tiles: computed from the centre out, kept, and drawn over what is coarser.

import { penOf } from "../../base/front/dom.js";
import { channels } from "../../base/front/ramp.js";
import { tileFromPyramid } from "./tiles.js";
import { breathe } from "./weights.js";

/**
 * @import { Scale } from "./colour.js"
 * @import { Helper } from "./helper.js"
 * @import { Axis, Layout } from "./layout.js"
 * @import { Afar, CellKind, Grid, Shown, Sketch, Tile, TileInSight } from "./types.d.ts"
 */

export const TILE = 256; // cells a side
const MOST_TILES = 64; // how many are kept, at least twice those in sight: half a megabyte each
const SIDE_BY_SIDE = 2; // asked for at a time
const COLOURING = 8; // ms of a frame

/**
 * Whether a tile can be made of the head's pyramid.
 *
 * @param {Afar} given
 * @param {Pick<Grid, "perRow" | "perColumn">} given
 */
const fromPyramid = ({ pyramid }, { perRow, perColumn }) =>
  pyramid !== null && perRow >= pyramid.perRow && perColumn >= pyramid.perColumn;

export class Picture {
  /**
   * `changed`: called when a tile has come.
   *
   * @param {Helper} helper
   * @param {() => void} changed
   */
  constructor(helper, changed) {
    this.helper = helper;
    this.changed = changed;
    /** @type {Map<string, Tile>} */
    this.tiles = new Map(); // by name, last used last
    /** @type {TileInSight[]} */
    this.wanted = [];
    /** @type {Map<string, { id: number, costly: boolean }>} */
    this.running = new Map();
    /** @type {WeakMap<Afar, number>} */
    this.numbers = new WeakMap();
    this.most = MOST_TILES;
    this.heads = 0;
  }

  /**
   * The names of a head's tiles, by the content of their cells.
   *
   * @param {Afar} head
   * @param {CellKind} given
   */
  nameOf(head, { mean, relative }) {
    if (!this.numbers.has(head)) this.numbers.set(head, ++this.heads);
    return `${this.numbers.get(head)} ${mean ? "mean" : "max"} ${relative}`;
  }

  /**
   * The tiles in sight, the nearest to the centre first.
   *
   * @param {Afar} head
   * @param {Layout} layout
   * @param {CellKind} kind
   * @returns {TileInSight[]}
   */
  inSight(head, layout, kind) {
    const { down, across } = layout;
    /**
     * @param {Axis} axis
     * @returns {[number, number, number]}
     */
    const range = (axis) => {
      const [first, last] = [axis.offset, axis.offset + axis.room].map((pixel) => pixel / axis.cell / TILE);
      return [Math.floor(first), Math.ceil(Math.min(last, axis.cells / TILE)), (first + last) / 2];
    };
    const [top, bottom, middle] = range(down);
    const [left, right, centre] = range(across);
    const found = [];
    for (let row = top; row < bottom; row++) {
      for (let column = left; column < right; column++) {
        found.push({
          ...kind,
          head,
          name: `${this.nameOf(head, kind)} ${down.per} ${across.per} ${row} ${column}`,
          i: row * TILE * down.per,
          j: column * TILE * across.per,
          rows: Math.min(TILE, down.cells - row * TILE),
          columns: Math.min(TILE, across.cells - column * TILE),
          perRow: down.per,
          perColumn: across.per,
          far: Math.hypot(row + 0.5 - middle, column + 0.5 - centre),
        });
      }
    }
    return found.sort((a, b) => a.far - b.far);
  }

  /**
   * Computes the missing ones of these tiles, in this order. Tiles that were wanted before are dropped.
   *
   * @param {TileInSight[]} tiles
   */
  want(tiles) {
    this.wanted = tiles.filter(({ name }) => !this.tiles.has(name) && !this.running.has(name));
    this.most = Math.max(MOST_TILES, 2 * tiles.length);
    const names = new Set(tiles.map(({ name }) => name));
    for (const [name, { id, costly }] of this.running) if (costly && !names.has(name)) this.helper.stop(id);
    this.next();
  }

  /** Begins as many of those that are wanted as are computed side by side. */
  next() {
    for (const tile of this.wanted.splice(0, SIDE_BY_SIDE - this.running.size)) this.start(tile);
  }

  /** @param {TileInSight} tile */
  async start(tile) {
    const { head, name, perRow, perColumn } = tile;
    const { i, j, rows, columns, mean, relative } = tile;
    const request = { i, j, rows, columns, perRow, perColumn, mean, relative };
    const { id, answer } = "query" in head && !fromPyramid(head, tile) ? this.helper.ask(head, { job: "tile", request })
      : { id: 0, answer: breathe().then(() => tileFromPyramid(head, request)) };
    this.running.set(name, { id, costly: perRow * perColumn > 4 });
    const values = await answer;
    this.running.delete(name);
    if (values instanceof Float32Array) {
      this.tiles.set(name, { ...request, values, canvas: null, colours: "" });
      for (const oldest of [...this.tiles.keys()].slice(0, this.tiles.size - this.most)) this.tiles.delete(oldest);
    }
    this.changed();
    this.next();
  }

  /**
   * A tile that has been computed; it counts as used now.
   *
   * @param {string} name
   */
  find(name) {
    const tile = this.tiles.get(name);
    if (tile) {
      this.tiles.delete(name);
      this.tiles.set(name, tile);
    }
    return tile;
  }

  /**
   * Draws the computed tiles of a view, coarser ones first. Returns whether all tiles are there in the current colours.
   *
   * @param {CanvasRenderingContext2D} pen
   * @param {Shown | Sketch} shown
   * @param {Layout} layout
   * @param {CellKind} kind
   * @param {CanvasPattern} hatch
   * @param {string} odd
   */
  draw(pen, shown, layout, kind, hatch, odd) {
    const { down, across } = layout;
    const sight = this.inSight(shown.head, layout, kind);
    const there = sight.flatMap(({ name }) => this.find(name) ?? []);
    let all = there.length === sight.length;
    const start = `${this.nameOf(shown.head, kind)} `;
    const coarser = all ? [] : Array.from(this.tiles).filter(([name, { perRow, perColumn }]) =>
      name.startsWith(start) && perRow >= down.per && perColumn >= across.per &&
      perRow * perColumn > down.per * across.per).flatMap(([name]) => this.find(name) ?? []);
    coarser.sort((a, b) => b.perRow * b.perColumn - a.perRow * a.perColumn);
    pen.fillStyle = hatch;
    pen.fillRect(0, 0, across.room, down.room);
    pen.imageSmoothingEnabled = false;
    const colours = `${shown.scale.kind} ${shown.scale.most} ${odd}`;
    const began = performance.now();
    for (const tile of [...coarser, ...there]) {
      const [high, wide] = [(tile.perRow / down.per) * down.cell, (tile.perColumn / across.per) * across.cell];
      const y = (tile.i / down.per) * down.cell - down.offset;
      const x = (tile.j / across.per) * across.cell - across.offset;
      const [top, left] = [Math.max(0, Math.floor(-y / high)), Math.max(0, Math.floor(-x / wide))];
      const rows = Math.min(tile.rows, Math.ceil((down.room - y) / high)) - top;
      const columns = Math.min(tile.columns, Math.ceil((across.room - x) / wide)) - left;
      if (rows <= 0 || columns <= 0) continue;
      if (tile.colours !== colours && performance.now() - began < COLOURING) {
        colourTile(tile, shown.scale, odd);
        tile.colours = colours;
      } else if (tile.colours !== colours) {
        all = false;
        this.changed(); // with the next frame
        if (!tile.canvas) continue;
      }
      /** @type {[number, number, number, number]} */
      const place = [x + left * wide, y + top * high, columns * wide, rows * high];
      pen.fillRect(...place); // nothing coarser shows through where no pair is allowed
      if (tile.canvas) pen.drawImage(tile.canvas, left, top, columns, rows, ...place);
    }
    return all;
  }

  /**
   * The numbers of the cells of the whole view, row by row; NaN for cells that are not computed.
   *
   * @param {Afar} head
   * @param {Layout} layout
   * @param {CellKind} kind
   */
  valuesOf(head, layout, kind) {
    const { down, across } = layout;
    const found = new Float32Array(down.cells * across.cells).fill(NaN);
    for (const { name } of this.inSight(head, layout, kind)) {
      const tile = this.tiles.get(name);
      if (!tile) continue;
      tile.values.forEach((value, at) => {
        const row = tile.i / down.per + Math.floor(at / tile.columns);
        found[row * across.cells + tile.j / across.per + (at % tile.columns)] = value;
      });
    }
    return Array.from(found);
  }
}

/**
 * The tile's numbers as an image of one pixel a cell; cells with no allowed pair stay clear.
 *
 * @param {Tile} tile
 * @param {Scale} scale
 * @param {string} odd
 */
function colourTile(tile, scale, odd) {
  const image = new ImageData(tile.columns, tile.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = coloursOf(scale);
  const strange = packed(...channels(odd));
  tile.values.forEach((value, cell) => {
    if (value < 0) return;
    pixels[cell] = value === value ? colours[scale.step(value)] : strange;
  });
  tile.canvas ??= document.createElement("canvas");
  tile.canvas.width = tile.columns;
  tile.canvas.height = tile.rows;
  penOf(tile.canvas).putImageData(image, 0, 0);
}

/**
 * A colour as one number, as an image holds it.
 *
 * @param {...number} colour
 */
function packed(...colour) {
  return new Uint32Array(Uint8Array.of(...colour, 255).buffer)[0];
}

/**
 * The 256 colours of a scale, each as one number.
 *
 * @param {Scale} given
 */
const coloursOf = ({ table }) =>
  Uint32Array.from({ length: 256 }, (_, step) => packed(...table.subarray(3 * step, 3 * step + 3)));
