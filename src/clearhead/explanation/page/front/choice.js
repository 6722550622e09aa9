// ---- What is chosen, and the one way it changes: choose() some of it, then the page is painted.
//
// `step`: the name of the step whose card is shown. `of`: that of the step whose number is written out. `at`: the
// place of that number by the names of its axes. All of it stands in the address, so that a link leads to it.

import { byId, data } from "./data.js";
import { steps } from "./steps.js";

export let choice = null;

const firstAt = () => Object.fromEntries(["B", "H", "Lq", "Lk"].map((axis, n) => [axis, data.pair[n]]));

export function addressOf({ step, of, at }) {
  const places = Object.entries(at).filter(([, n]) => n).map(([axis, n]) => `${axis}.${n}`);
  const parts = [["step", step], ...(of && of !== step ? [["of", of]] : []), ["at", places.join("_")]];
  return `#${new URLSearchParams(parts)}`;
}

/** What the address names; anything in it that does not exist is left out. */
function readAddress() {
  const parts = new URLSearchParams(window.location.hash.slice(1));
  const named = (name) => (steps.has(parts.get(name)) ? parts.get(name) : null);
  const step = named("step") ?? steps.keys().next().value;
  const at = parts.has("at") ? {} : firstAt();
  for (const [, axis, n] of (parts.get("at") ?? "").matchAll(/([A-Za-z]\w{0,20}?)\.(\d{1,6})(?:_|$)/g)) at[axis] = Number(n);
  for (const axis of ["B", "H"]) at[axis] = Math.min(at[axis] ?? 0, data.labels[axis].length - 1);
  return { step, of: named("of") ?? step, at };
}

function writeAddress(asNew) {
  const address = addressOf(choice);
  if (address === window.location.hash) return;
  try {
    window.history[asNew ? "pushState" : "replaceState"](null, "", address);
  } catch {
    // A page inside another document may not change its address: it works without.
  }
}

let painter = () => {};

/** What shows all that is chosen, whenever something has changed. */
export function paintWith(paint) {
  painter = paint;
}

export function refresh() {
  say("");
  painter();
}

/** Opens what the address names. */
export function openAddress() {
  choice = readAddress();
}

export function choose(what) {
  const before = choice.step;
  choice = { ...choice, ...what };
  if (what.step && !what.of) choice.of = what.step;
  writeAddress(choice.step !== before);
  refresh();
}

export const say = (text) => { byId("said").textContent = text; };
