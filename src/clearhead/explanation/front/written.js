// ---- The chosen number, written out from the numbers that it is made of, which light up in the tables.

import { make } from "../../base/front/dom.js";
import { namesIn } from "../../base/front/language.js";
import { placeOf, textOf } from "../../base/front/numbers.js";
import { placesIn, plainText } from "../../base/front/terms.js";
import { chosenIndex, visibleViews } from "./cards.js";
import { choice } from "./choice.js";
import { byId, data } from "./data.js";
import { editable, stepOf } from "./steps.js";
import { axisKey, LABELLED, labelOf } from "./tables.js";

/**
 * @import { Piece, Source } from "../../base/front/types.d.ts"
 * @import { Step, TableView } from "./types.d.ts"
 */

const TONES = 3; // colours that tell the numbers of one step from those of the next

/**
 * The name of an entry's index as formulas have it: `scores[0, 2]`.
 *
 * @param {Step} step
 * @param {number[]} index
 */
export function placeName(step, index) {
  const places = index.flatMap((n, axis) => {
    const name = step.axes[axis];
    if (name === "1" || (axis < 2 && LABELLED.indexOf(name) === axis && data.single[axis])) return [];
    const known = data.places[name];
    const entry = step.of && axis < 4 ? step.of[axis] : n;
    return [known && (known.length === step.sizes[axis] || step.of) ? known[entry] : entry];
  });
  return places.length ? `${step.name}[${places.join(", ")}]` : step.name;
}

/**
 * The node that computes a step, if the page has all numbers that it reads: of some steps it has one vector alone.
 *
 * @param {Step} step
 */
const canWriteOut = (step) =>
  step.tree && step.made && namesIn(step.tree).every((name) => !stepOf(name).of) ? step.made : null;

/**
 * The chosen place at another sequence or head. A number that is made of numbers of one head, as where heads stand side by
 * side, gives way to the first number of the new head.
 *
 * @param {"B" | "H"} axis
 * @param {number} n
 */
export function placeAt(axis, n) {
  const at = { ...choice.at, [axis]: n };
  const step = stepOf(choice.of);
  const node = canWriteOut(step);
  const last = step.axes.length - 1;
  if (!node || step.axes.includes(axis)) return at;
  const index = chosenIndex(step);
  for (let c = 0; c < step.sizes[last]; c++) {
    index[last] = c;
    const from = placesIn(node, index).flatMap((source) => {
      const other = stepOf(source.step).axes.indexOf(axis);
      return other < 0 || stepOf(source.step).sizes[other] < 2 ? [] : [source.index[other]];
    });
    if (from.length && from.every((place) => place === n)) return { ...at, [axisKey(step, last)]: c };
  }
  return at;
}

/**
 * The sentence of one number, as pieces.
 *
 * @param {Step} step
 * @param {number[]} index
 * @returns {Piece[]}
 */
export function sentenceOf(step, index) {
  const x = step.numbers[placeOf(index, step.sizes)];
  const result = step.kind === "allowed" ? (x ? "True" : "False") : textOf(x, step.kind);
  const node = canWriteOut(step);
  const made = node ? node.term(index).pieces : [];
  const place = placeName(step, index);
  if (!node || plainText(made) === result) {
    return [`${place} = `, ...made.filter((piece) => typeof piece !== "string" && !piece.text), result];
  }
  return step.kind === "allowed" ? [`${place}: `, ...made, " is ", result] : [`${place} = `, ...made, " = ", result];
}

/**
 * @param {Step} step
 * @param {number[]} index
 */
export function showNumber(step, index) {
  const box = byId("written");
  // an input, among inputs, needs no bar that stays in sight
  byId("below").classList.toggle("plain", step.given && stepOf(choice.step).given);
  /** @type {Map<string, number>} */
  const tones = new Map(); // of each step's name, the colour of its numbers
  const node = canWriteOut(step);
  const sources = node ? placesIn(node, index) : [];
  for (const { step: name } of sources) if (!tones.has(name)) tones.set(name, 1 + (tones.size % TONES));
  const line = make("p", "sentence");
  const pieces = sentenceOf(step, index);
  pieces.forEach((piece, n) => {
    if (typeof piece === "string") {
      line.append(n === pieces.length - 1 ? make("b", "", piece) : piece);
      return;
    }
    const span = make("span", `tone-${tones.get(piece.step)}`, piece.text);
    span.title = placeName(stepOf(piece.step), piece.index);
    line.append(span);
  });
  const words = step.axes.flatMap((name, axis) =>
    (["Lq", "Lk"].includes(name) && step.sizes[axis] > 1 ? [labelOf(step, axis, index[axis])] : []));
  const pair = make("p", "quiet");
  words.forEach((word, n) => pair.append(...(n ? [" → "] : []), make("bdi", "", word)));
  const how = { number: ": type a number to change it", integer: ": type a whole number to change it", allowed: ": click to turn it over" };
  if (step.given) pair.append(words.length ? " · " : "", `an input${editable(step) ? how[step.kind] : ""}`);
  box.replaceChildren(line, pair);
  lightUp(step, index, sources, tones);
}

const LIGHTS = ["lit", "same", ...Array.from({ length: TONES }, (_, n) => `tone-${n + 1}`)];

/**
 * Marks the number, the numbers that it is made of, and the rows and names of its query and its key.
 *
 * @param {Step} step
 * @param {number[]} index
 * @param {Source[]} sources
 * @param {Map<string, number>} tones
 */
function lightUp(step, index, sources, tones) {
  for (const marked of document.querySelectorAll("#cards .lit, #cards .same, #cards td[class*=tone-]")) {
    marked.classList.remove(...LIGHTS);
  }
  const place = Object.fromEntries(["Lq", "Lk"].map((name) => {
    const axis = step.axes.indexOf(name);
    return [name, axis >= 0 && step.sizes[axis] > 1 ? index[axis] : null];
  }));
  for (const view of visibleViews()) {
    const direct = sources.filter((piece) => piece.step === view.step.name);
    if (direct.length && view.step.axes.length > 4) view.turnTo(direct[0].index);
    for (const piece of direct) view.cellAt(piece.index)?.classList.add(`tone-${tones.get(piece.step)}`);
    if (view.step === step) view.cellAt(index)?.classList.add("lit");
    markNames(view, place, !direct.length && view.step !== step);
  }
}

/**
 * Marks the names of a query and of a key; of an input with one of the two, the row as well.
 *
 * @param {TableView} view
 * @param {Record<string, number | null>} place
 * @param {boolean} withRow
 */
function markNames(view, place, withRow) {
  const names = view.step.axes;
  const row = view.rows === null ? null : place[names[view.rows]] ?? null;
  const column = view.columns === null ? null : place[names[view.columns]] ?? null;
  if (row !== null && view.cells[row]) {
    view.cells[row][0].parentElement?.firstElementChild?.classList.add("same");
    const input = view.step.given && !(names.includes("Lq") && names.includes("Lk"));
    if (withRow && input) view.cells[row].forEach((cell) => cell.classList.add("same"));
  }
  if (column !== null) view.figure.querySelectorAll("thead th")[column]?.classList.add("same");
}

/** Writes out the chosen number. */
export function showChosen() {
  const step = stepOf(choice.of);
  showNumber(step, chosenIndex(step));
}
