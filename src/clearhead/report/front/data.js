// ---- The page's data as objects. The format is described in `clearhead/report/page.py`.

import { breathe, rowsOf } from "./weights.js";

/**
 * @import {
 *   Afar, DataSource, Head, Layer, MeasureFigure, Meta, Numbers, Places, Tiles, TilesAt
 * } from "./types.d.ts"
 */

const PLACES = 8; // the largest number of arrays in a block: the place of an array is 8 * block + its place in the block
const plainArrays = [Uint8Array, Int32Array, Float32Array, Float64Array];

/**
 * The arrays of a block, an ArrayBuffer: kind and bytes as int32, the values, filled up to 8 bytes; and so on.
 *
 * @param {ArrayBuffer} buffer
 * @returns {Numbers[]}
 */
export function arraysOf(buffer) {
  const found = [];
  for (let at = 0; at < buffer.byteLength;) {
    const [kind, bytes] = new Int32Array(buffer, at, 2);
    at += 8;
    if (kind < plainArrays.length) {
      const type = plainArrays[kind];
      found.push(new type(buffer, at, bytes / type.BYTES_PER_ELEMENT));
    } else found.push(kind === 4 ? multiplesOf(buffer, at) : planesOf(new Uint8Array(buffer, at, bytes)));
    at += bytes + ((8 - (bytes % 8)) % 8);
  }
  return found;
}

/**
 * The numbers of an array of whole multiples of steps, as float32 row by row: see `multiples` in `_blocks.py`.
 *
 * @param {ArrayBuffer} buffer
 * @param {number} start
 */
function multiplesOf(buffer, start) {
  const [rows, columns, planes] = new Int32Array(buffer, start, 4);
  const stepOf = new Float64Array(buffer, start + 16, columns);
  const bytes = new Uint8Array(buffer, start + 16 + 8 * columns);
  const numbers = new Float32Array(rows * columns);
  const count = rows * columns;
  const together = 256; // a few rows at a time, so that they stay in the cache
  for (let top = 0; top < rows; top += together) {
    const below = Math.min(rows, top + together);
    for (let column = 0; column < columns; column++) {
      const step = stepOf[column];
      for (let row = top; row < below; row++) {
        const at = column * rows + row;
        let unsigned = bytes[at];
        for (let plane = 1; plane < planes; plane++) unsigned |= bytes[plane * count + at] << (8 * plane);
        numbers[row * columns + column] = ((unsigned >>> 1) ^ -(unsigned & 1)) * step;
      }
    }
  }
  return numbers;
}

/**
 * Numbers of 16 bits: the low bytes of all, then the high ones.
 *
 * @param {Uint8Array} bytes
 */
function planesOf(bytes) {
  const numbers = new Uint16Array(bytes.length / 2);
  const count = numbers.length;
  for (let at = 0; at < count; at++) numbers[at] = bytes[at] | (bytes[count + at] << 8);
  return numbers;
}

/**
 * @param {string} base64
 * @returns {Uint8Array<ArrayBuffer>}
 */
function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

/**
 * The promise of the inflated bytes, as an ArrayBuffer.
 *
 * @param {BlobPart} bytes
 */
const unpacked = (bytes) =>
  new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();

/**
 * The data in a page: the metadata at once, and a block when it is asked for.
 *
 * @param {Document} page
 * @returns {DataSource}
 */
export function embeddedSource(page) {
  return {
    meta: JSON.parse(page.getElementById("meta")?.textContent ?? "null"),
    async block(number) {
      const find = () => page.getElementById(`block-${number}`);
      // the file is still being read: an element that nothing follows may not have all of its text
      while (page.readyState === "loading" && !find()?.nextSibling) await breathe();
      const element = find();
      if (!element) throw new Error(`the file is cut short: block ${number} is missing`);
      const packed = bytesOf(element.textContent);
      element.remove(); // the text is larger than the values, and not needed again
      return unpacked(packed);
    },
  };
}

/**
 * The data from binary messages: `ask(number)` is the promise of the bytes of a block.
 *
 * @param {Meta} meta
 * @param {(number: number) => Promise<BlobPart>} ask
 * @returns {DataSource}
 */
export const messageSource = (meta, ask) => ({ meta, block: async (number) => unpacked(await ask(number)) });

/** The data of a page. `source`: its `meta`, and `block(number)`, the promise of an ArrayBuffer. */
export class Run {
  /** @param {DataSource} source */
  constructor(source) {
    const { title, texts, originals, steps, measures, distinctive, opens, leftOut, beside, aligned, flows, image } = source.meta;
    this.title = title;
    this.texts = texts;
    this.originals = originals;
    this.steps = steps;
    this.measures = measures;
    this.distinctive = distinctive;
    this.leftOut = leftOut;
    this.beside = beside;
    this.aligned = aligned;
    this.flows = flows;
    this.image = image;
    /** @type {Layer[]} */
    this.layers = source.meta.layers.map((layer) => ({
      ...layer,
      heads: layer.heads.map((head) => ({ ...head, measures: this.named(head.measures) })),
    }));
    this.first = opens ?? distinctive ?? { layer: 0, head: 0 }; // the head on which the page opens
    this.source = source;
    /** @type {Map<number, Promise<Numbers[]>>} */
    this.blocks = new Map();
    /** @type {Map<string, { afar: Promise<Afar>, whole: Promise<Head> }>} */
    this.heads = new Map();
  }

  /**
   * The measures of a head by their names: [value, uniform attention's value, key or null, number of queries or null].
   *
   * @param {(MeasureFigure | 0)[] | undefined} values
   */
  named(values) {
    /** @type {Record<string, MeasureFigure>} */
    const found = {};
    (values ?? []).forEach((value, number) => {
      if (value) found[this.measures[number].name] = [value[0], value[1], value[2] ?? null, value[3] ?? null];
    });
    return found;
  }

  /**
   * The promise of the array at a place.
   *
   * @param {number} place
   * @returns {Promise<Numbers>}
   */
  async array(place) {
    return (await this.block(place))[place % PLACES];
  }

  /**
   * The promise of the block that contains a place.
   *
   * @param {number} place
   */
  block(place) {
    const number = Math.floor(place / PLACES);
    const block = this.blocks.get(number) ?? this.source.block(number).then(arraysOf);
    this.blocks.set(number, block);
    return block;
  }

  /**
   * The promise of an array that is stored in one part or in several; null where there is no array.
   *
   * @param {Places | null | undefined} places
   * @returns {Promise<Numbers | null>}
   */
  async joined(places) {
    if (places === undefined || places === null) return null;
    if (!Array.isArray(places)) return this.array(places);
    const parts = [];
    for (const place of places) parts.push(await this.array(place)); // in turn: unpacking takes several times the room
    const Kind = /** @type {new (length: number) => Numbers} */ (parts[0].constructor);
    const whole = new Kind(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const [number, part] of parts.entries()) {
      whole.set(part, at);
      const block = await this.block(places[number]);
      block[places[number] % PLACES] = whole.subarray(at, at += part.length); // so that it is held once
    }
    return whole;
  }

  /**
   * The promise of one head: see `readHead`.
   *
   * @param {number} layerIndex
   * @param {number} headIndex
   */
  open(layerIndex, headIndex) {
    return this.begun(layerIndex, headIndex).whole;
  }

  /**
   * The promise of a head before its query and key are read: see `readAfar`.
   *
   * @param {number} layerIndex
   * @param {number} headIndex
   */
  afar(layerIndex, headIndex) {
    return this.begun(layerIndex, headIndex).afar;
  }

  /**
   * @param {number} layerIndex
   * @param {number} headIndex
   */
  begun(layerIndex, headIndex) {
    const name = `${layerIndex}/${headIndex}`;
    const known = this.heads.get(name);
    if (known) return known;
    const afar = readAfar(this, this.layers[layerIndex], headIndex);
    const begun = { afar, whole: afar.then((head) => readHead(this, head)) };
    this.heads.set(name, begun);
    return begun;
  }
}

/**
 * What a head is without its operands: the sizes and factors of its layer, and what stands beside its map. Of a long head
 * that is little, and stands first in the file: with `pyramid` its map from afar is drawn while the rest is being read.
 *
 * @param {Run} run
 * @param {Layer} layer
 * @param {number} headIndex
 * @returns {Promise<Afar>}
 */
async function readAfar(run, layer, headIndex) {
  const parts = { ...layer.shared, ...layer.heads[headIndex] };
  const { queries, keys, features, phi, scale, softcap, position, kind } = layer;
  const { pyramid } = parts;
  const [start, stop, counts, expected, logsumexp, entropy, received, distance, max, mean] = await Promise.all([
    parts.start, parts.stop, parts.counts, parts.expected, parts.logsumexp, parts.entropy, parts.received, parts.distance,
    pyramid?.max, pyramid?.mean,
  ].map((places) => run.joined(places)));
  if (!start || !stop || !counts) throw new Error(`${layer.label}: its spans are missing`);
  return {
    layer, number: parts.number, queries, keys, features, phi, scale, softcap, position, kind, parts,
    sink: parts.sink ?? null, start, stop, counts, expected, logsumexp, entropy, received, distance,
    pyramid: pyramid && max && mean ? { ...pyramid, max, mean } : null,
  };
}

/**
 * The same with all that `weights.js` reads. Row by row: `query` (queries, features), `key` (keys, features), `weight`
 * (features) of φ or null, `scores` (queries, keys) where they were given; `start`, `stop`, `counts` (queries), `expected`
 * (keys); what is added to a score, each null where there is none: `relative` (queries + keys - 1), `dense` with its rows
 * and columns, `tiles`; `holes`, tiles of bits; `logsumexp`, `entropy`, `distance` (queries) and `received` (keys), which
 * `rowsOf` computes where the file does not have them.
 *
 * @param {Run} run
 * @param {Afar} head
 * @returns {Promise<Head>}
 */
async function readHead(run, head) {
  const { parts, keys } = head;
  // one after the other: unpacking takes several times the room
  const query = await run.joined(parts.query);
  const key = await run.joined(parts.key);
  const weight = await run.joined(parts.weight);
  const scores = await run.joined(parts.scores);
  const relative = await run.joined(parts.relative);
  const valueNorms = await run.joined(parts.valueNorms);
  const transformedNorms = await run.joined(parts.transformedNorms);
  const dense = parts.dense ? { ...parts.dense, values: await run.array(parts.dense.values) } : null;
  const tiles = await tilesOf(run, parts.tiles, keys);
  const holes = await tilesOf(run, parts.holes, keys);
  const none = new Float32Array(0); // of a score that was given as a matrix
  const norms = { valueNorms, transformedNorms };
  const read = Object.assign(head, norms, { query: query ?? none, key: key ?? none, weight, scores, relative, dense, tiles, holes });
  const { logsumexp, entropy, received } = read;
  if (logsumexp && entropy && received) return Object.assign(read, { logsumexp, entropy, received });
  return Object.assign(read, rowsOf(read));
}

/**
 * @param {Run} run
 * @param {TilesAt | null | undefined} given
 * @param {number} keys
 * @returns {Promise<Tiles | null>}
 */
async function tilesOf(run, given, keys) {
  if (!given) return null;
  const [places, values] = [await run.array(given.places), await run.joined(given.values)];
  if (!values) throw new Error("tiles without values");
  return { side: given.side, across: Math.ceil(keys / given.side), places, values };
}
