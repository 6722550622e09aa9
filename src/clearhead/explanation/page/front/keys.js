// ---- Pointer and keyboard: a cell under the pointer or in focus is written out, a click or Enter fixes it.

import { stepBy, visibleViews } from "./cards.js";
import { choice, choose } from "./choice.js";
import { byId } from "./data.js";
import { editCell } from "./edit.js";
import { editable } from "./steps.js";
import { axisKey } from "./tables.js";
import { showChosen, showNumber } from "./written.js";

function viewOf(cell) {
  return visibleViews().find((view) => view.figure.contains(cell)) ?? null;
}

const cellIn = (target) => (target instanceof Element ? target.closest("#cards td.cell") : null);

function showCell(cell) {
  const view = viewOf(cell);
  if (view) showNumber(view.step, view.indexAt(cell));
}

/** Makes a cell the chosen one: its step, where that has a card of its own here, and its place. */
function fixCell(cell) {
  const view = viewOf(cell);
  const index = view.indexAt(cell);
  const at = { ...choice.at };
  index.forEach((n, axis) => {
    if (view.step.sizes[axis] > 1) at[axisKey(view.step, axis)] = n;
  });
  choose({ at, of: view.step.name });
}

function moveFrom(cell, key) {
  const view = viewOf(cell);
  const [r, c] = view.positionOf(cell);
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
  const next = view.cells[r + down]?.[c + right];
  if (!next) return;
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function onCellKey(event, cell) {
  const view = viewOf(cell);
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

const STEP_KEYS = { j: 1, k: -1, ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, select, textarea, pre")) return;
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
    if (!cell || event.target.matches("input")) return;
    fixCell(cell);
    editCell(viewOf(cell), cell);
  });
  document.addEventListener("keydown", onKey);
}
