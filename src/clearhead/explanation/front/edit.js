// ---- An input's cell as a field: Enter or leaving it takes the number, Escape leaves it as it was. A cell of a mask
// has no field: it changes between True and False.

import { make } from "../../base/front/dom.js";
import { placeOf } from "../../base/front/numbers.js";
import { refresh, say } from "./choice.js";
import { editable, fitted, refusal, setInput } from "./steps.js";
import { placeName } from "./written.js";

/** @import { TableView } from "./types.d.ts" */

/**
 * @param {TableView} view
 * @param {HTMLElement} cell
 * @param {string} [typed]
 */
export function editCell(view, cell, typed) {
  const { step } = view;
  if (!editable(step) || cell.querySelector("input")) return;
  const index = view.indexAt(cell);
  const before = step.numbers[placeOf(index, step.sizes)];
  if (step.kind === "allowed") {
    setInput(step, index, 1 - before);
    refresh();
    return;
  }
  const written = String(step.kind === "integer" ? before : Number(before.toPrecision(7)));
  const field = make("input");
  field.type = "text";
  field.inputMode = step.kind === "integer" ? "numeric" : "decimal";
  field.value = typed ?? written;
  field.setAttribute("aria-label", placeName(step, index));
  cell.replaceChildren(field);
  field.focus();
  if (typed === undefined) field.select();
  let open = true;
  /** @param {boolean} focusCell */
  const close = (focusCell) => {
    open = false;
    field.remove();
    view.paint();
    if (focusCell) cell.focus();
  };
  /** @param {boolean} focusCell */
  const take = (focusCell) => {
    if (!open) return;
    const untouched = typed === undefined && field.value === written;
    const value = untouched ? before : fitted(step, field.value);
    if (value === null) {
      field.setAttribute("aria-invalid", "true");
      say(refusal(step, field.value));
      if (!focusCell) close(false);
      return;
    }
    if (value !== before) setInput(step, index, value);
    close(focusCell);
    refresh();
  };
  field.addEventListener("blur", () => take(false));
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") take(true);
    if (event.key === "Escape") close(true);
  });
}
