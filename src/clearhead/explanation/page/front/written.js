// ---- The chosen number, written out from the numbers that it is made of; those light up in the tables.

import { namesIn } from "../../../base/front/language.js";
import { placeOf, textOf } from "../../../base/front/numbers.js";
import { placesIn, plainText } from "../../../base/front/terms.js";
import { chosenIndex, visibleViews } from "./cards.js";
import { choice } from "./choice.js";
import { byId, data } from "./data.js";
import { editable, steps } from "./steps.js";
import { element, LABELLED, labelOf } from "./tables.js";

const TONES = 3; // colours in which the numbers of one step and those of the next stand apart

/** The name of an entry's index as formulas have it: `scores[0, 2]`. */
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

/** Whether the numbers that this step reads are all here: of some steps the page holds one vector alone. */
const canWriteOut = (step) => step.made && namesIn(step.tree).every((name) => !steps.get(name).of);

/** The sentence of one number, as pieces. */
export function sentenceOf(step, index) {
  const x = step.numbers[placeOf(index, step.sizes)];
  const result = step.kind === "allowed" ? (x ? "True" : "False") : textOf(x, step.kind);
  const pieces = [`${placeName(step, index)} = `];
  if (canWriteOut(step)) {
    const made = step.made.term(index).pieces;
    if (plainText(made) !== result) pieces.push(...made, " = ");
    else pieces.push(...made.filter((piece) => piece.step && !piece.text));
  }
  return [...pieces, result];
}

export function showNumber(step, index) {
  const box = byId("written");
  const tones = new Map(); // of each step's name, the colour of its numbers
  const sources = canWriteOut(step) ? placesIn(step.made, index) : [];
  for (const { step: name } of sources) if (!tones.has(name)) tones.set(name, 1 + (tones.size % TONES));
  const line = element("p", "sentence");
  const pieces = sentenceOf(step, index);
  pieces.forEach((piece, n) => {
    if (!piece.step) {
      line.append(n === pieces.length - 1 ? element("b", "", piece) : piece);
      return;
    }
    const span = element("span", `tone-${tones.get(piece.step)}`, piece.text);
    span.title = placeName(steps.get(piece.step), piece.index);
    line.append(span);
  });
  const words = step.axes.flatMap((name, axis) =>
    (["Lq", "Lk"].includes(name) && step.sizes[axis] > 1 ? [labelOf(step, axis, index[axis])] : []));
  const pair = element("p", "quiet");
  words.forEach((word, n) => pair.append(...(n ? [" → "] : []), element("bdi", "", word)));
  const how = { number: ": type a number to change it", integer: ": type a whole number to change it", allowed: ": click to turn it over" };
  if (step.given) pair.append(words.length ? " · " : "", `an input${editable(step) ? how[step.kind] : ""}`);
  box.replaceChildren(line, pair);
  lightUp(step, index, sources, tones);
}

const LIGHTS = ["lit", "same", ...Array.from({ length: TONES }, (_, n) => `tone-${n + 1}`)];

/** Marks the number, what it is made of, and the rows and names of its query and its key. */
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

/** Marks the names of a query and of a key; of an input with one of the two, the row as well. */
function markNames(view, place, withRow) {
  const names = view.step.axes;
  const row = view.rows === null ? null : place[names[view.rows]] ?? null;
  const column = view.columns === null ? null : place[names[view.columns]] ?? null;
  if (row !== null && view.cells[row]) {
    view.cells[row][0].parentElement.firstChild.classList.add("same");
    const input = view.step.given && !(names.includes("Lq") && names.includes("Lk"));
    if (withRow && input) view.cells[row].forEach((cell) => cell.classList.add("same"));
  }
  if (column !== null) view.figure.querySelectorAll("thead th")[column]?.classList.add("same");
}

/** Writes out the chosen number. */
export function showChosen() {
  const step = steps.get(choice.of);
  showNumber(step, chosenIndex(step));
}
