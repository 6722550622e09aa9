// Units of what needs no page: addresses, tokens in words, the tree of a step and its numbers.
import assert from "node:assert";
import test from "node:test";

import { addressFrom, numberIn, partsOf } from "../../src/clearhead/base/front/address.js";
import { callsIn, changed, constantIn, namesIn } from "../../src/clearhead/base/front/language.js";
import { everyIndex, grouped, number, placeOf } from "../../src/clearhead/base/front/numbers.js";
import { nodeOf } from "../../src/clearhead/base/front/operations.js";
import { plainText } from "../../src/clearhead/base/front/terms.js";
import { fromRanges, rangesOf } from "../../src/clearhead/report/front/chosen.js";
import { headName, labelsOf } from "../../src/clearhead/report/front/names.js";
import { percent, readText } from "../../src/clearhead/report/front/words.js";

test("an address holds what is chosen, and gives it back", () => {
  const address = addressFrom([["layer", 2], ["tokens", "3-7.9"], ["pair", null], ["only", "L3 & H8=1"]]);
  assert.strictEqual(address, "#layer=2&tokens=3-7.9&only=L3+%26+H8%3D1");
  const parts = partsOf(address);
  assert.deepStrictEqual([parts.get("layer"), parts.get("pair"), parts.get("only")], ["2", null, "L3 & H8=1"]);
});

test("a number of an address is one that exists", () => {
  assert.deepStrictEqual(["0", "4", "5", "-1", "1.5", "", null, "1e1"].map((text) => numberIn(text, 5)),
    [0, 4, null, null, null, null, null, null]);
});

test("positions as ranges", () => {
  assert.strictEqual(rangesOf([9, 3, 4, 5, 7, 6]), "3-7.9");
  assert.deepStrictEqual(fromRanges("3-7.9", 20), [3, 4, 5, 6, 7, 9]);
  assert.deepStrictEqual(fromRanges("3-1000000000", 6), [3, 4, 5]);
  for (const bad of [null, "", "a", "3-", ".3", "3..4"]) assert.deepStrictEqual(fromRanges(bad, 9), []);
});

test("tokens of bytes are the signs that they stand for, and no token is unseen", () => {
  const words = readText(["ĠÃ©tÃ©", "Ġ", "\u202e", "ðŁ", "ĺĢ"]);
  assert.strictEqual(words[0].label, "été");
  assert.ok(words[0].gap && words.every(({ label }) => label.trim() !== ""));
  assert.deepStrictEqual(readText(["un", "##der", "un"]).map(({ joined, repeated }) => [joined, repeated]),
    [[false, true], [true, false], [false, true]]);
});

test("no two layers have one label", () => {
  const layer = (label, role) => ({ label, role, kind: "self" });
  assert.deepStrictEqual(labelsOf([layer("L0", "encoder"), layer("L0", "decoder"), layer("L1", null)]),
    ["encoder L0", "decoder L0", "L1"]);
  assert.strictEqual(new Set(labelsOf([layer("L0"), layer("L0"), layer("L0")])).size, 3);
});

test("a head is called by its layer and its own number", () => {
  const run = { layers: [{ heads: [{ number: 3 }, {}] }] };
  const name = (label, head) => headName({ labels: [label], run }, { layer: 0, head });
  assert.deepStrictEqual(["L0", "L12′", "L1, step 2", "L1, cross", "decoder L0"].map((label) => name(label, 0)),
    ["L0H3", "L12′H3", "L1H3, step 2", "L1H3, cross", "decoder L0H3"]);
  assert.deepStrictEqual(["decoder 1, cross, step 2", "encoder 0′"].map((label) => name(label, 1)),
    ["decoder 1, cross, head 1, step 2", "encoder 0′, head 1"]);
});

test("numbers in words", () => {
  assert.deepStrictEqual([0, 1, 0.0312, 1e-8, NaN].map(percent), ["0%", "100%", "3.1%", "< 0.00001%", "not a number"]);
  assert.deepStrictEqual([0, 0.05, 12345.678, -Infinity].map(number), ["0", "0.05000", "1.235e+04", "-∞"]);
  assert.strictEqual(grouped(1234567), "1,234,567");
});

const named = (name) => ({ kind: "name", name });
const value = (value) => ({ kind: "value", value, text: null });
const call = (name, ...inputs) => ({ kind: "call", name, inputs, options: {} });

test("a tree is computed and written out", () => {
  const tree = call("mul", call("matmul", named("query"), call("transpose", named("key"), value(-2), value(-1))), value(0.5));
  assert.deepStrictEqual([namesIn(tree), callsIn(tree)], [["query", "key"], ["mul", "matmul", "transpose"]]);
  const over = (step, values, sizes) => ({
    axes: sizes.map((n) => ({ n, more: 0 })),
    at: (index) => values[placeOf(index, sizes)],
    term: (index) => ({ binds: 5, pieces: [{ text: String(values[placeOf(index, sizes)]), step, index: [...index] }] }),
  });
  const steps = new Map([["query", { node: over("query", [1, 2, 3, 4], [2, 2]) }], ["key", { node: over("key", [5, 6, 7, 8], [2, 2]) }]]);
  const node = nodeOf(tree, steps);
  const found = [];
  everyIndex([2, 2], (index) => found.push(node.at(index)));
  assert.deepStrictEqual(found, [8.5, 11.5, 19.5, 26.5]);
  assert.strictEqual(plainText(node.term([1, 0]).pieces), "(3·5 + 4·6)·0.5000");
  const twice = changed(tree, (inner) => (inner.kind === "value" && inner.value === 0.5 ? value(1) : null));
  assert.strictEqual(nodeOf(twice, steps).at([0, 0]), 17);
  const largest = { ...call("amax", named("query"), value(-1)), options: { keepdim: value(true) } };
  assert.deepStrictEqual(nodeOf(largest, steps).axes.map(({ n }) => n), [2, 1]);
  assert.strictEqual(nodeOf(largest, steps).at([1, 0]), 4);
  const hidden = call("masked_fill", named("query"), call("gt", named("query"), value(2)), value("-inf"));
  assert.deepStrictEqual([[0, 1], [1, 0]].map((index) => nodeOf(hidden, steps).at(index)), [2, -Infinity]);
  assert.throws(() => nodeOf(call("nothing", named("query")), steps), /no operation nothing/);
  assert.throws(() => nodeOf(named("value"), steps), /no step is called value/);
});

test("a value that JSON has no number for is its name", () => {
  assert.deepStrictEqual(["inf", "-inf", "nan", true, false, "float32", 3].map((each) => constantIn(value(each))),
    [Infinity, -Infinity, NaN, 1, 0, "float32", 3]);
});
