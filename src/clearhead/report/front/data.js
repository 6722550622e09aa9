// ---- The page's own data: metadata at once, arrays when a head is first opened.

const byId = (id) => document.getElementById(id);
let meta = null;

const arrayTypes = {
  float32: Float32Array,
  float64: Float64Array,
  int32: Int32Array,
  uint8: Uint8Array,
};

/** Resolves when the parser has read the whole file: the last blocks come after this program. */
const allRead = new Promise((resolve) => {
  if (document.readyState !== "loading") resolve();
  else document.addEventListener("DOMContentLoaded", () => resolve());
});

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

async function decodeBlock(number) {
  let element = byId(`block-${number}`);
  if (!element) {
    await allRead;
    element = byId(`block-${number}`);
  }
  if (!element) throw new Error(`the file is cut short: block ${number} is missing`);
  const packed = new Blob([bytesOf(element.textContent)]);
  const stream = packed.stream().pipeThrough(new DecompressionStream("deflate"));
  const values = await new Response(stream).arrayBuffer();
  element.remove(); // the text is larger than the values, and not needed again
  const type = meta.types[number];
  return type === "multiples" ? multiplesOf(values) : new arrayTypes[type](values);
}

/**
 * Whole multiples of a step for each column, as numbers row by row: rows, columns and bytes a multiple as int32; the
 * steps as float64; then the lowest byte of each multiple, one column after another, the next, …
 */
function multiplesOf(values) {
  const [rows, columns, planes] = new Int32Array(values, 0, 4);
  const stepOf = new Float64Array(values, 16, columns);
  const bytes = new Uint8Array(values, 16 + 8 * columns);
  const numbers = new Float32Array(rows * columns);
  const count = rows * columns;
  for (let column = 0, at = 0; column < columns; column++) {
    const step = stepOf[column];
    for (let row = 0; row < rows; row++, at++) {
      let unsigned = 0;
      for (let plane = planes - 1; plane >= 0; plane--) unsigned = unsigned * 256 + bytes[plane * count + at];
      const half = Math.floor(unsigned / 2);
      numbers[row * columns + column] = (unsigned % 2 ? -half - 1 : half) * step;
    }
  }
  return numbers;
}

const decoded = new Map();

/** The promise of block `number`; null for an array that the head does not have. */
function block(number) {
  if (number === null) return null;
  if (!decoded.has(number)) decoded.set(number, decodeBlock(number));
  return decoded.get(number);
}

const opened = new Map();

/**
 * The promise of one head: its arrays, and the sizes and factors of its layer.
 * Shapes, row by row: query (queries, features), key (keys, features), start, stop, logsumexp,
 * distance (queries), received (keys), bias (queries, keys).
 */
function openHead(layerIndex, headIndex) {
  const name = `${layerIndex}/${headIndex}`;
  if (!opened.has(name)) opened.set(name, readHead(meta.layers[layerIndex], headIndex));
  return opened.get(name);
}

async function readHead(layer, headIndex) {
  const numbers = layer.heads[headIndex];
  const fields = ["query", "key", "start", "stop", "bias", "logsumexp", "received", "distance"];
  const arrays = await Promise.all(fields.map((field) => block(numbers[field])));
  const head = {
    layer,
    queries: layer.queries,
    keys: layer.keys,
    features: layer.features,
    scale: layer.scale,
    softcap: layer.softcap,
    sink: numbers.sink,
  };
  fields.forEach((field, index) => { head[field] = arrays[index]; });
  return head;
}

const embeddedSource = (within) => {
  meta = JSON.parse(within.getElementById("meta").textContent);
  return { meta, block };
};

class Run {
  constructor(source) {
    this.source = source;
    this.layers = meta.layers;
    this.texts = meta.texts;
    this.steps = meta.steps;
    this.title = meta.title;
    this.measures = meta.measures;
    this.distinctive = meta.distinctive;
    this.first = meta.distinctive ?? { layer: 0, head: 0 };
  }

  array(place) {
    return block(place);
  }

  open(layer, head) {
    return openHead(layer, head);
  }
}
