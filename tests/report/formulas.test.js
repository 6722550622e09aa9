// Units of data.js, weights.js and tiles.js. `data`: what Python wrote; `wanted`: what it must give, from float64 in NumPy.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import test from "node:test";
import zlib from "node:zlib";

import { arraysOf, embeddedSource, messageSource, Run } from "../../src/clearhead/report/front/data.js";
import { tileOf } from "../../src/clearhead/report/front/tiles.js";
import {
  countsOf, dot, entropyOf, lookOf, mayLook, rankOf, scoreOf, sinkShareOf, term, weightOf,
} from "../../src/clearhead/report/front/weights.js";

const { data, wanted } = JSON.parse(readFileSync(process.env.GIVEN, "utf8"));

const ask = async (number) => Buffer.from(data.blocks[number], "base64");
const run = new Run(messageSource(data.meta, ask));

/** Every number is that of Python, NaN and infinities too. */
function near(found, expected, tolerance, what) {
  assert.strictEqual(found.length, expected.length, what);
  expected.forEach((text, place) => {
    const number = typeof text === "string" ? Number(text.replace("inf", "Infinity")) : text;
    const same = Object.is(found[place], number) || Math.abs(found[place] - number) <= tolerance;
    assert.ok(same, `${what}, place ${place}: ${found[place]}, and not ${number}`);
  });
}

wanted.forEach((layer, layerIndex) => layer.heads.forEach((expected, headIndex) => {
  test(`${layer.name}, head ${headIndex}`, async () => {
    const head = await run.open(layerIndex, headIndex);
    const pairs = (of) => Array.from({ length: head.queries * head.keys }, (_, place) =>
      of(head, Math.floor(place / head.keys), place % head.keys));
    assert.deepStrictEqual([head.queries, head.keys, head.phi], layer.sizes);
    near(pairs((...at) => Number(mayLook(...at))), expected.allowed, 0, "allowed");
    near(pairs(scoreOf).map((score, place) => (expected.allowed[place] ? score : 0)), expected.scores, layer.fine, "scores");
    near(pairs(weightOf), expected.weights, layer.fine, "weights");
    near(Array.from(head.logsumexp), expected.logsumexp, layer.fine, "logsumexp");
    near(Array.from(head.entropy), expected.entropy, layer.fine, "entropy");
    near(Array.from(head.received), expected.received, layer.fine, "received");
    if (expected.distance) near(Array.from(head.distance), expected.distance, layer.fine + 1e-6 * Math.max(...expected.distance), "distance");
    else assert.strictEqual(head.distance, null);
    near(Array.from(countsOf(head)), expected.counts, 0, "counts");
    near(Array.from(head.expected), expected.expected, 1e-6 * head.queries, "expected");
    near(Array.from(head.counts, (_, i) => sinkShareOf(head, i)), expected.sinkShare, layer.fine, "share of the sink");
    if (head.phi) {
      near(pairs((...at) => Array.from({ length: head.features }, (_, d) => term(...at, d)).reduce((a, b) => a + b, 0)),
        pairs(dot), 1e-9, "terms");
    }
    const look = lookOf(head, "out", head.queries - 1);
    near(Array.from(look.weights), expected.weights.slice(-head.keys), layer.fine, "a row");
    near([entropyOf(look)], expected.look, layer.fine, "the entropy of a row");
    const column = lookOf(head, "in", 0);
    near(Array.from(column.weights), expected.weights.filter((_, place) => place % head.keys === 0), layer.fine, "a column");
    const [perRow, perColumn] = [2, 3];
    const cells = { rows: Math.ceil(head.queries / perRow), columns: Math.ceil(head.keys / perColumn), perRow, perColumn };
    const pool = await tileOf(head, { i: 0, j: 0, ...cells, mean: false, relative: false }, () => true);
    near(Array.from(pool), expected.pool, Math.max(layer.fine, 1e-7), "a map");
    assert.strictEqual(head.number, expected.number);
  });
}));

test("equal weights are ranked in the order of the tokens", () => {
  const head = {
    queries: 1, keys: 4, start: [0], stop: [4], scores: [1, 1, 2, 1], scale: 1, softcap: null, sink: null,
    logsumexp: [Math.log(3 * Math.exp(1) + Math.exp(2))],
  };
  const look = lookOf(head, "out", 0);
  assert.deepStrictEqual(look.ranked, [2, 0, 1, 3]);
  assert.deepStrictEqual([0, 1, 2, 3].map((other) => rankOf(look, other)), [2, 2, 1, 2]);
});

test("what is opened twice is one head, and a source may send blocks when they are asked for", async () => {
  assert.strictEqual(run.open(0, 0), run.open(0, 0));
  const asked = [];
  const other = new Run(messageSource(data.meta, (number) => { asked.push(number); return ask(number); }));
  const head = await other.open(0, 0);
  assert.deepStrictEqual(Array.from(head.query), Array.from((await run.open(0, 0)).query));
  assert.ok(asked.length < data.blocks.length && new Set(asked).size === asked.length);
});

test("a block is taken when all of it has been read", async () => {
  const text = (numbers) => zlib.deflateSync(Buffer.concat([Buffer.from(Int32Array.from([0, 8]).buffer), Buffer.from(numbers)])).toString("base64");
  const whole = text([1, 2, 3, 4, 5, 6, 7, 8]);
  const elements = { meta: { textContent: "{}" } };
  const page = { readyState: "loading", getElementById: (id) => elements[id] ?? null };
  const source = embeddedSource(page);
  const block = source.block(0).then(arraysOf);
  const pause = () => new Promise((resolve) => { setTimeout(resolve, 20); });
  await pause();
  elements["block-0"] = { textContent: whole.slice(0, 9), nextSibling: null, remove() {} };
  await pause();
  Object.assign(elements["block-0"], { textContent: whole, nextSibling: {} });
  assert.deepStrictEqual(Array.from((await block)[0]), [1, 2, 3, 4, 5, 6, 7, 8]);
  elements["block-1"] = { textContent: whole, nextSibling: null, remove() {} }; // the last of all
  const last = source.block(1).then(arraysOf);
  await pause();
  page.readyState = "interactive";
  assert.strictEqual((await last)[0].length, 8);
  await assert.rejects(source.block(2), /block 2 is missing/);
});

test("ranks and measures", async () => {
  const look = { weights: [0.2, 0.5, 0.2], allowed: [0, 1, 2] };
  assert.deepStrictEqual([0, 1, 2].map((other) => rankOf(look, other)), [2, 1, 2]);
  for (const layer of run.layers) {
    for (const head of layer.heads) {
      for (const [value, uniform, key] of Object.values(head.measures)) {
        assert.ok(typeof value === "number" && typeof uniform === "number" && (key === null || Number.isInteger(key)));
      }
    }
  }
});
