// ---- Pointer and keyboard: a cell under the pointer or in focus is written out, a click or Enter fixes it.

import { ARROWS, closestTo, withModifier } from "../../base/front/dom.js";
import { stepBy, visibleViews } from "./cards.js";
import { choice, choose } from "./choice.js";
import { byId } from "./data.js";
import { editCell } from "./edit.js";
import { editable } from "./steps.js";
import { axisKey } from "./tables.js";
import { showChosen, showNumber } from "./written.js";

/** @param {HTMLElement} cell */
function viewOf(cell) {
  return visibleViews().find((view) => view.figure.contains(cell)) ?? null;
}

/** @param {EventTarget | null} target */
const cellIn = (target) => closestTo(target, "#cards td.cell");

/** @param {HTMLElement} cell */
function showCell(cell) {
  const view = viewOf(cell);
  if (view) showNumber(view.step, view.indexAt(cell));
}

/**
 * Chooses a cell: its place, and its step where the step has a card of its own.
 *
 * @param {HTMLElement} cell
 */
function fixCell(cell) {
  const view = viewOf(cell);
  if (!view) return;
  const index = view.indexAt(cell);
  const at = { ...choice.at };
  index.forEach((n, axis) => {
    if (view.step.sizes[axis] > 1) at[axisKey(view.step, axis)] = n;
  });
  choose({ at, of: view.step.name });
}

/**
 * @param {HTMLElement} cell
 * @param {string} key
 */
function moveFrom(cell, key) {
  const view = viewOf(cell);
  const step = ARROWS[key];
  if (!view || !step) return;
  const [r, c] = view.positionOf(cell);
  const next = view.cells[r + step[0]]?.[c + step[1]];
  if (!next) return;
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

/**
 * @param {KeyboardEvent} event
 * @param {HTMLElement} cell
 */
function onCellKey(event, cell) {
  const view = viewOf(cell);
  if (!view) return false;
  if (event.key.startsWith("Arrow")) {
    moveFrom(cell, event.key);
    return true;
  }
  if (["Enter", " ", "F2"].includes(event.key)) {
    if (editable(view.step) && (event.key !== " " || view.step.kind === "allowed")) editCell(view, cell);
    else fixCell(cell);
    return true;
  }
  if (/^[-\d.]$/.test(event.key) && editable(view.step) && view.step.kind !== "allowed") {
    editCell(view, cell, event.key);
    return true;
  }
  return false;
}

/** @type {Record<string, number>} */
const STEP_KEYS = { j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (withModifier(event) || (event.target instanceof Element && event.target.matches("input, select, textarea, pre"))) return;
  const cell = cellIn(event.target);
  if (cell && onCellKey(event, cell)) {
    event.preventDefault();
  } else if (Object.hasOwn(STEP_KEYS, event.key)) {
    event.preventDefault();
    stepBy(STEP_KEYS[event.key], Boolean(cell));
  }
}

export function listen() {
  const box = byId("cards");
  box.addEventListener("pointerover", (event) => {
    const cell = cellIn(event.target);
    if (cell) showCell(cell);
  });
  box.addEventListener("pointerleave", showChosen);
  box.addEventListener("focusin", (event) => {
    const cell = cellIn(event.target);
    if (cell) showCell(cell);
  });
  box.addEventListener("focusout", (event) => {
    if (!cellIn(event.relatedTarget)) showChosen();
  });
  box.addEventListener("click", (event) => {
    const cell = cellIn(event.target);
    if (!cell || event.target instanceof HTMLInputElement) return;
    fixCell(cell);
    const view = viewOf(cell);
    if (view) editCell(view, cell);
  });
  document.addEventListener("keydown", onKey);
}
