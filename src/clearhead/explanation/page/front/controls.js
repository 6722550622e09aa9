// ---- What stands above the steps: which head, scale and temperature, theme, one step or all.

import { number } from "../../../base/front/numbers.js";
import { cardOf, cards, everythingShown, stepBy } from "./cards.js";
import { choice, choose, refresh, say } from "./choice.js";
import { isDark } from "./colour.js";
import { byId, data } from "./data.js";
import {
  change, computeAgain, editable, firstScale, isChanged, obstacle, resetAll, scaleStep, softmaxPart, steps,
} from "./steps.js";
import { element, visible } from "./tables.js";

/** A slider of powers of two around `middle`, with the exact number in a field beside it. */
function makeSlider(name, middle, read, write) {
  const box = byId(name);
  const [range, field] = [box.querySelector("input[type=range]"), box.querySelector("input[type=text]")];
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

const sliders = [];

export function makeControls() {
  const set = (name) => (value) => {
    change[name] = value;
    computeAgain();
  };
  if (!obstacle && scaleStep) sliders.push(makeSlider("scale", firstScale || 1, () => change.scale, set("scale")));
  if (!obstacle && softmaxPart) sliders.push(makeSlider("temperature", 1, () => change.temperature, set("temperature")));
  byId("reset").hidden = Boolean(obstacle);
  byId("reset").addEventListener("click", () => {
    resetAll();
    refresh();
    say("All numbers are those first given.");
  });
  const notes = data.leftOut.map((text) => `Of ${visible(text)}.`);
  if (obstacle) notes.push(`This page shows the numbers, and cannot compute with others: ${obstacle}`);
  byId("left-out").append(...notes.map((text) => element("p", "quiet", text)));
  const masks = [...steps.values()].some((step) => editable(step) && step.kind === "allowed");
  byId("note").textContent = "Click a number to see what it is made of." +
    (obstacle ? "" : " Change an input (underlined) or a slider, and all later steps follow.") +
    (masks ? " A click turns a cell of a mask over." : "");
  byId("previous").addEventListener("click", () => stepBy(-1));
  byId("next").addEventListener("click", () => stepBy(1));
  byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  byId("view").addEventListener("click", () => setView(everythingShown() ? "one" : "all"));
  for (const axis of ["B", "H"]) makeBlocks(axis);
}

/** Buttons for the sequence or the head whose numbers are shown. */
function makeBlocks(axis) {
  const labels = data.labels[axis];
  const box = byId(axis === "B" ? "sequences" : "heads");
  if (labels.length < 2) return;
  box.hidden = false;
  labels.forEach((label, n) => {
    const wrapped = element("label");
    const input = element("input");
    Object.assign(input, { type: "radio", name: axis, value: String(n) });
    input.addEventListener("change", () => choose({ at: { ...choice.at, [axis]: n } }));
    wrapped.append(input, element("span", "", visible(label)));
    box.append(wrapped);
  });
}

export function paintControls() {
  for (const paint of sliders) paint();
  for (const axis of ["B", "H"]) {
    const input = document.querySelector(`input[name=${axis}][value="${choice.at[axis] ?? 0}"]`);
    if (input) input.checked = true;
  }
  byId("reset").disabled = !isChanged();
}

export function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "light" : "dark";
  byId("theme").setAttribute("aria-label", `Use the ${theme === "dark" ? "light" : "dark"} theme`);
  if (choice) refresh();
}

function setView(view) {
  document.documentElement.dataset.view = view;
  byId("view").textContent = view === "all" ? "one step" : "all steps";
  refresh();
  cards[cardOf(steps.get(choice.step))].element.scrollIntoView({ block: "nearest" });
}

/** Paper is white and has all steps; afterwards the page is as it was. */
export function followPrinting() {
  let before = null;
  window.matchMedia("print").addEventListener("change", (event) => {
    if (event.matches) {
      before = { ...document.documentElement.dataset };
      setView("all");
      setTheme("light");
    } else if (before) {
      setView(before.view);
      setTheme(before.theme);
    }
  });
}
