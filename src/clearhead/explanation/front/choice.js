// ---- The choice, and the one way to change it: choose() changes a part of it, then the page is painted.
//
// `step`: the name of the step whose card is shown. `of`: the step whose number is written out. `at`: the
// place of that number by the names of its axes. The address holds the whole choice, so that a link leads to it.

import { addressFrom, partsOf, writeAddress } from "../../base/front/address.js";
import { byId, data } from "./data.js";
import { steps } from "./steps.js";

/** @import { Choice } from "./types.d.ts" */

/** @returns {Record<string, number>} */
const firstAt = () => Object.fromEntries(["B", "H", "Lq", "Lk"].map((axis, n) => [axis, data.pair[n]]));

/** @param {Pick<Choice, "step" | "at"> & Partial<Choice>} given */
export function addressOf({ step, of, at }) {
  const places = Object.entries(at).filter(([, n]) => n).map(([axis, n]) => `${axis}.${n}`);
  return addressFrom([["step", step], ["of", of && of !== step ? of : null], ["at", places.join("_")]]);
}

/**
 * The choice that the address names, without names of things that do not exist.
 *
 * @returns {Choice}
 */
function readAddress() {
  const parts = partsOf(window.location.hash);
  /** @param {string} name */
  const named = (name) => steps.get(parts.get(name) ?? "")?.name;
  const step = named("step") ?? data.parts[0].steps[0].name;
  const at = parts.has("at") ? {} : firstAt();
  for (const [, axis, n] of (parts.get("at") ?? "").matchAll(/([A-Za-z]\w{0,20}?)\.(\d{1,6})(?:_|$)/g)) at[axis] = Number(n);
  for (const axis of ["B", "H"]) at[axis] = Math.min(at[axis] ?? 0, data.labels[axis].length - 1);
  return { step, of: named("of") ?? step, at };
}

export let choice = readAddress();

let painter = () => {};

/**
 * Sets the function that paints the page whenever the choice has changed.
 *
 * @param {() => void} paint
 */
export function paintWith(paint) {
  painter = paint;
}

export function refresh() {
  say("");
  painter();
}

/** Makes the choice that the address names. */
export function openAddress() {
  choice = readAddress();
}

/** @param {Partial<Choice>} what */
export function choose(what) {
  const before = choice.step;
  choice = { ...choice, ...what };
  if (what.step && !what.of) choice.of = what.step;
  writeAddress(addressOf(choice), choice.step !== before);
  refresh();
}

/** @param {string} text */
export const say = (text) => { byId("said").textContent = text; };
