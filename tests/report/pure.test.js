// Units of what needs no page: addresses, tokens in words, the language of a step's code and its numbers.
import assert from "node:assert";
import test from "node:test";

import { addressFrom, numberIn, partsOf } from "../../src/clearhead/base/front/address.js";
import { callsIn, namesIn, read } from "../../src/clearhead/base/front/language.js";
import { everyIndex, grouped, number, placeOf } from "../../src/clearhead/base/front/numbers.js";
import { nodeOf } from "../../src/clearhead/base/front/operations.js";
import { plainText } from "../../src/clearhead/base/front/terms.js";
import { fromRanges, rangesOf } from "../../src/clearhead/report/front/chosen.js";
import { labelsOf } from "../../src/clearhead/report/front/names.js";
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

test("numbers in words", () => {
  assert.deepStrictEqual([0, 1, 0.0312, 1e-8, NaN].map(percent), ["0%", "100%", "3.1%", "< 0.00001%", "not a number"]);
  assert.deepStrictEqual([0, 0.05, 12345.678, -Infinity].map(number), ["0.0000", "0.05000", "1.235e+04", "-∞"]);
  assert.strictEqual(grouped(1234567), "1,234,567");
});

test("a line of code is read, computed and written out", () => {
  const { name, tree } = read("scores = query @ key.transpose(-2, -1) * 0.5");
  assert.deepStrictEqual([name, namesIn(tree), callsIn(tree)], ["scores", ["query", "key"], ["mul", "matmul", "transpose", "neg"]]);
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
  assert.throws(() => nodeOf(read("a = torch.nothing(query)").tree, steps), /no operation nothing/);
  assert.throws(() => read("a = query +"), SyntaxError);
});
