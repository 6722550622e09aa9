// ---- The steps: their numbers as Python computed them, and computed again when an input, the scale or the
// temperature is changed.

import { changed, namesIn } from "../../base/front/language.js";
import { everyIndex, grouped, number, placeOf, sizeOf, textOf } from "../../base/front/numbers.js";
import { nodeOf } from "../../base/front/operations.js";
import { leaf } from "../../base/front/terms.js";
import { data, decode } from "./data.js";

/**
 * @import { Computed, Tree } from "../../base/front/types.d.ts"
 * @import { Part, Step, StepData } from "./types.d.ts"
 */

/**
 * Numbers of a step as a node, read where they stand.
 *
 * @param {Step} step
 * @returns {Computed}
 */
const numbersOf = (step) => ({
  axes: step.sizes.map((n, axis) => ({ n, more: step.of ? 0 : step.more[axis] })),
  at: (index) => step.numbers[placeOf(index, step.sizes)],
  term: (index) => leaf(
    step.kind === "allowed" ? (step.numbers[placeOf(index, step.sizes)] ? "True" : "False")
      : textOf(step.numbers[placeOf(index, step.sizes)], step.kind),
    { step: step.name, index: [...index] },
  ),
});

/** @type {Part[]} */
export const parts = data.parts.map((part) => ({ ...part, steps: part.steps.map(begun) }));
export const steps = new Map(parts.flatMap((part) => part.steps.map((step) => [step.name, step])));

/**
 * A step as the page holds it.
 *
 * @param {StepData} data
 * @returns {Step}
 */
function begun(data) {
  const numbers = decode(data);
  const none = { made: null, problem: "", changed: false };
  const step = /** @type {Step} */ ({ ...data, ...none, numbers, first: numbers });
  step.node = numbersOf(step);
  return step;
}

/**
 * The step of this name, which exists.
 *
 * @param {string} name
 */
export function stepOf(name) {
  const step = steps.get(name);
  if (!step) throw new Error(`no step is called ${name}`);
  return step;
}

/** @param {Computed} node */
export function allNumbers(node) {
  const numbers = new Float64Array(sizeOf(node.axes.map((axis) => axis.n)));
  let place = 0;
  everyIndex(node.axes.map((axis) => axis.n), (index) => { numbers[place++] = node.at(index); });
  return numbers;
}

/**
 * Whether two numbers are the same but for rounding in float32, among numbers as large as `size`.
 *
 * @param {number} a
 * @param {number} b
 * @param {number} size
 */
const alike = (a, b, size) => Object.is(a, b) || a === b || Math.abs(a - b) <= 1e-3 * (1e-3 + size);

/** @param {Float64Array | number[]} numbers */
export const largestSize = (numbers) => {
  let most = 0;
  for (const x of numbers) if (Number.isFinite(x)) most = Math.max(most, Math.abs(x));
  return most;
};

for (const step of steps.values()) {
  if (!step.tree) continue;
  try {
    step.made = nodeOf(step.tree, steps);
    if (step.of) fillIn(step);
  } catch (error) {
    step.problem = error instanceof Error ? error.message : String(error);
    step.made = null;
  }
}

/**
 * The steps after the last step that this page computes, and those that no other step is computed from: gradients, and
 * steps that a model computed. They stay as Python gave them.
 */
const backwards = [...steps.values()].reverse();
const read = new Set(backwards.flatMap((step) => (step.tree ? namesIn(step.tree) : [])));
const outside = new Set([
  ...backwards.slice(0, backwards.findIndex((step) => step.tree)),
  ...backwards.filter((step) => step.given && !read.has(step.name)),
]);

/**
 * Computes all vectors of a step of which the page holds one, if that one comes out the same.
 *
 * @param {Step} step
 */
function fillIn(step) {
  const { made, of } = step;
  if (!made || !of) return;
  const sizes = made.axes.map((axis) => axis.n);
  const vector = Array.from(step.numbers);
  const found = vector.map((_, n) => made.at([...of.map((x, axis) => Math.min(x, sizes[axis] - 1)), n]));
  if (!found.every((x, n) => alike(x, vector[n], largestSize(vector)))) throw new Error("its numbers come out otherwise");
  Object.assign(step, { sizes, numbers: allNumbers(made), of: null, more: made.axes.map((axis) => axis.more) });
  step.node = numbersOf(step);
}

/** Why the page can't compute with other inputs; empty where it can. */
function findObstacle() {
  const all = [...steps.values()];
  const [held, keys] = data.keys;
  if (held < keys) return `it holds ${held} of ${grouped(keys)} keys, and the softmax needs every one.`;
  if (!data.whole) return "its inputs are too many.";
  const unknown = all.find((step) => !step.given && !step.tree && !outside.has(step));
  if (unknown) return `“${unknown.name}” shows no steps of its own: its formula is known to Python alone.`;
  const unread = all.find((step) => step.problem);
  if (unread) return `it does not know how “${unread.name}” is computed (${unread.problem}).`;
  if (all.some((step) => step.given && step.numbers.some(Number.isNaN))) return "its inputs hold NaN.";
  for (const step of all) {
    if (!step.made) continue;
    const mine = allNumbers(step.made);
    const size = largestSize(step.numbers);
    if (mine.length !== step.numbers.length || mine.some((x, n) => !alike(x, step.numbers[n], size))) {
      return `its own arithmetic does not give Python's numbers for “${step.name}”.`;
    }
  }
  return "";
}

export const obstacle = findObstacle();
for (const step of steps.values()) step.first = step.numbers;

/** The step `scores = … * scale`, and the step of which the softmax is taken: the sliders change these two. */
export const scaleStep = [...steps.values()].find((step) => {
  const tree = step.tree;
  if (tree?.kind !== "call" || tree.name !== "mul" || step.aside) return false;
  return tree.inputs[0].kind === "name" && tree.inputs[1].kind === "value";
});
export const softmaxPart = parts.find((part) => ["maximum", "weights"].every((name) => part.steps.some((step) => step.name === name)));
const logits = !softmaxPart?.steps.some((step) => step.tree) ? []
  : [...new Set(softmaxPart.steps.flatMap((step) => (step.tree ? namesIn(step.tree) : [])))]
    .filter((name) => stepOf(name).kind === "number" && (stepOf(name).given || !softmaxPart.steps.includes(stepOf(name))));
const scaleTree = scaleStep?.tree?.kind === "call" ? scaleStep.tree : null;
const written = scaleTree?.inputs[1];
export const firstScale = written?.kind === "value" && typeof written.value === "number" ? written.value : undefined;

export const change = { scale: firstScale, temperature: 1, inputs: /** @type {Set<string>} */ (new Set()) };
export const isChanged = () => change.scale !== firstScale || change.temperature !== 1 || change.inputs.size > 0;

/**
 * A step's tree with the scale and the temperature of the sliders.
 *
 * @param {Step} step
 * @returns {Tree | null}
 */
function treeNow(step) {
  if (step === scaleStep && scaleTree && change.scale !== undefined && change.scale !== firstScale) {
    return { ...scaleTree, inputs: [scaleTree.inputs[0], { kind: "value", value: change.scale, text: null }] };
  }
  if (!step.tree || change.temperature === 1 || !softmaxPart?.steps.includes(step)) return step.tree;
  /** @type {Tree} */
  const divisor = { kind: "value", value: change.temperature, text: null };
  return changed(step.tree, (tree) => (tree.kind === "name" && logits.includes(tree.name)
    ? { kind: "call", name: "div", inputs: [tree, divisor], options: {} } : null));
}

/** Computes again every step that a change reaches; the others keep Python's numbers. */
export function computeAgain() {
  const reached = new Set(change.inputs);
  for (const step of steps.values()) {
    const tree = treeNow(step);
    if (!tree) continue;
    step.made = nodeOf(tree, steps);
    const again = tree !== step.tree || namesIn(tree).some((name) => reached.has(name));
    if (again) reached.add(step.name);
    step.numbers = again ? allNumbers(step.made) : step.first;
    step.changed = again;
  }
}

/** @param {Step} step */
export const editable = (step) => !obstacle && step.given && !outside.has(step);

/**
 * Whether a step's numbers belong to other inputs than the page has now.
 *
 * @param {Step} step
 */
export const isStale = (step) => isChanged() && outside.has(step);

/**
 * Puts a number into an input, in all sequences and heads that share it.
 *
 * @param {Step} step
 * @param {number[]} index
 * @param {number} value
 */
export function setInput(step, index, value) {
  if (!change.inputs.has(step.name)) step.numbers = step.first.slice();
  change.inputs.add(step.name);
  const [sequences, group] = step.copies;
  const first = [sequences > 1 ? 0 : index[0], Math.floor(index[1] / group) * group];
  for (let b = 0; b < sequences; b++) {
    for (let h = 0; h < group; h++) {
      const place = sequences * group > 1 ? [first[0] + b, first[1] + h, ...index.slice(2)] : index;
      step.numbers[placeOf(place, step.sizes)] = value;
    }
  }
  if (step.numbers.every((x, n) => x === step.first[n])) change.inputs.delete(step.name);
  computeAgain();
}

/**
 * The number that a text stands for in the step's type; null where there is none, or the step may not have it.
 *
 * @param {Step} step
 * @param {string} text
 */
export function fitted(step, text) {
  const plain = text.trim().replace("−", "-");
  if (step.kind === "integer") {
    const [least, most] = step.within ?? [-Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER];
    const whole = /^[-+]?\d+$/.test(plain) ? Number(plain) + 0 : NaN; // -0 is 0
    return whole >= least && whole <= most ? whole : null;
  }
  const value = plain === "" ? NaN : Number(plain.replace(",", "."));
  const rounded = step.type === "float32" ? Math.fround(value) : value;
  return Number.isFinite(rounded) ? rounded : null;
}

/**
 * Why a text that was typed is not a number that the step may have.
 *
 * @param {Step} step
 * @param {string} text
 */
export function refusal(step, text) {
  if (step.kind !== "integer") return `“${text}” is no number that fits ${step.type}.`;
  return `“${text}” is no whole number${step.within ? ` from ${step.within.join(" to ")}` : ""}.`;
}

export function resetAll() {
  for (const name of change.inputs) stepOf(name).numbers = stepOf(name).first;
  Object.assign(change, { scale: firstScale, temperature: 1 });
  change.inputs.clear();
  computeAgain();
}

/**
 * A step's formula, with the scale and the temperature as they are.
 *
 * @param {Step} step
 */
export function formulaNow(step) {
  let [left, right] = [step.formula.split(" = ")[0], step.formula.split(" = ").slice(1).join(" = ")];
  if (step === scaleStep) right = right.replace(number(firstScale ?? 1), number(change.scale ?? 1));
  if (change.temperature !== 1 && softmaxPart?.steps.includes(step)) {
    for (const name of logits) {
      right = right.replace(new RegExp(`\\b${name}\\b(\\[[^\\]]*\\])?`, "g"), `($& / ${number(change.temperature)})`);
    }
  }
  return right ? `${left} = ${right.replace(/\(\(([^()]*)\)\)/g, "($1)")}` : left;
}

/**
 * Why a step is taken. Figures in it are those of the first numbers.
 *
 * @param {Step} step
 */
export function whyNow(step) {
  if (isStale(step)) return `Of the numbers first given; this page does not compute it again. ${step.why}`;
  return step.changed && /\d\.\d|\d%|\d of \d|sum to \d/.test(step.why) ? `With the numbers first given: ${step.why}` : step.why;
}
