// ---- The controls above the steps: the head, scale and temperature, the theme, one step or all.

import { everyIn, firstIn, make } from "../../base/front/dom.js";
import { number } from "../../base/front/numbers.js";
import { cardOf, cards, everythingShown, stepBy } from "./cards.js";
import { choice, choose, refresh, say } from "./choice.js";
import { theme } from "./colour.js";
import { byId, data } from "./data.js";
import {
  change, computeAgain, editable, firstScale, isChanged, obstacle, resetAll, scaleStep, softmaxPart, stepOf, steps,
} from "./steps.js";
import { visible } from "./tables.js";
import { placeAt } from "./written.js";

/**
 * A slider of powers of two around `middle`, with the exact number in a field beside it.
 *
 * @param {"scale" | "temperature"} name
 * @param {number} middle
 * @param {() => number} read
 * @param {(value: number) => void} write
 */
function makeSlider(name, middle, read, write) {
  const box = byId(name);
  const range = firstIn(box, "input[type=range]", HTMLInputElement);
  const field = firstIn(box, "input[type=text]", HTMLInputElement);
  box.hidden = false;
  range.addEventListener("input", () => {
    write(middle * 2 ** Number(range.value));
    refresh();
  });
  field.addEventListener("change", () => {
    const value = Number(field.value.trim().replace(",", "."));
    const good = Number.isFinite(value) && field.value.trim() !== "" && (name !== "temperature" || value > 0);
    if (good) write(value);
    refresh();
    if (!good) say(`“${field.value}” is no ${name}.`);
  });
  return () => {
    const value = read();
    const power = value / middle > 0 ? Math.log2(value / middle) : 0;
    if (document.activeElement !== range) range.value = String(power);
    range.setAttribute("aria-valuetext", number(value));
    if (document.activeElement !== field) field.value = String(Number(value.toPrecision(6)));
  };
}

/** @type {(() => void)[]} functions that show the place of each slider */
const sliders = [];

export function makeControls() {
  /** @param {"scale" | "temperature"} name */
  const set = (name) => (/** @type {number} */ value) => {
    change[name] = value;
    computeAgain();
  };
  if (!obstacle && scaleStep) sliders.push(makeSlider("scale", firstScale || 1, () => change.scale ?? 1, set("scale")));
  if (!obstacle && softmaxPart) sliders.push(makeSlider("temperature", 1, () => change.temperature, set("temperature")));
  byId("reset").hidden = Boolean(obstacle);
  byId("reset").addEventListener("click", () => {
    resetAll();
    refresh();
    say("All numbers are those first given.");
  });
  const notes = data.leftOut.map((text) => `Of ${visible(text)}.`);
  if (obstacle) notes.push(`This page shows the numbers, and cannot compute with others: ${obstacle}`);
  byId("left-out").append(...notes.map((text) => make("p", "quiet", text)));
  const masks = [...steps.values()].some((step) => editable(step) && step.kind === "allowed");
  byId("note").textContent = "Click a number to see what it is made of." +
    (obstacle ? "" : " Change an input (underlined) or a slider, and all later steps follow.") +
    (masks ? " A click turns a cell of a mask over." : "");
  byId("previous").addEventListener("click", () => stepBy(-1));
  byId("next").addEventListener("click", () => stepBy(1));
  byId("theme").addEventListener("click", () => theme.turn());
  byId("view").addEventListener("click", () => setView(everythingShown() ? "one" : "all"));
  makeBlocks("B");
  makeBlocks("H");
}

/**
 * Buttons for the sequence or the head whose numbers are shown.
 *
 * @param {"B" | "H"} axis
 */
function makeBlocks(axis) {
  const labels = data.labels[axis];
  const box = byId(axis === "B" ? "sequences" : "heads");
  if (labels.length < 2) return;
  box.hidden = false;
  labels.forEach((label, n) => {
    const wrapped = make("label");
    const input = make("input");
    Object.assign(input, { type: "radio", name: axis, value: String(n) });
    input.addEventListener("change", () => choose({ at: placeAt(axis, n) }));
    wrapped.append(input, make("span", "", visible(label)));
    box.append(wrapped);
  });
}

export function paintControls() {
  const other = theme.dark ? "light" : "dark";
  byId("theme").textContent = other;
  byId("theme").setAttribute("aria-label", `Use the ${other} theme`);
  for (const paint of sliders) paint();
  for (const axis of ["B", "H"]) {
    const chosen = `input[name=${axis}][value="${choice.at[axis] ?? 0}"]`;
    for (const input of everyIn(document, chosen, HTMLInputElement)) input.checked = true;
  }
  byId("reset", HTMLButtonElement).disabled = !isChanged();
}

/** @param {string} view */
function setView(view) {
  document.documentElement.dataset.view = view;
  byId("view").textContent = view === "all" ? "one step" : "all steps";
  refresh();
  cards[cardOf(stepOf(choice.step))].element.scrollIntoView({ block: "nearest" });
}

/** A printed page has all steps, and the light theme; afterwards the page is as it was. */
export function followPrinting() {
  /** @type {string | undefined} */
  let before;
  theme.print.addEventListener("change", (event) => {
    if (event.matches) before = document.documentElement.dataset.view;
    setView(event.matches ? "all" : before ?? "one");
  });
}
