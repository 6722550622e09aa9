// ---- A step's numbers as a table: one sequence and head, with the names of its rows and columns.

import { make } from "../../base/front/dom.js";
import { grouped, placeOf, textOf } from "../../base/front/numbers.js";
import { choice } from "./choice.js";
import { coloursOf } from "./colour.js";
import { data } from "./data.js";
import { editable, isStale, largestSize } from "./steps.js";

/** @import { Step, TableView } from "./types.d.ts" */

const HEAT = { rows: 16, columns: 12 }; // a larger table is a heat map: the number of a cell is said when it is chosen
const DENSE = 4; // a table of more columns is set smaller
export const LABELLED = ["B", "H", "Lq", "Lk", "L"];

/**
 * Text in which characters that print nothing, or turn the line around, are seen.
 *
 * @param {string} text
 */
export const visible = (text) => text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (character) => {
  const code = (character.codePointAt(0) ?? 0).toString(16);
  return code.length <= 2 ? `\\x${code.padStart(2, "0")}` : `\\u${code.padStart(4, "0")}`;
});

/**
 * The name of an entry of an axis.
 *
 * @param {Step} step
 * @param {number} axis
 * @param {number} n
 */
export function labelOf(step, axis, n) {
  const name = step.axes[axis];
  const labels = data.labels[name];
  if (!labels) return name === "1" ? "" : String(n);
  if (step.of && axis < 4) return visible(labels[step.of[axis]] ?? labels[0]);
  return step.sizes[axis] === 1 && labels.length > 1 ? "every" : visible(labels[n]);
}

/**
 * The name under which the chosen entry of an axis is kept; an axis of the same name twice has two.
 *
 * @param {Step} step
 * @param {number} axis
 */
export function axisKey(step, axis) {
  const name = step.axes[axis];
  const before = step.axes.slice(0, axis).filter((other) => other === name).length;
  return before ? `${name}${before + 1}` : name;
}

/**
 * The axes of a step: those chosen above the table, its rows and its columns (null: one row, one column).
 *
 * @param {Step} step
 */
function layoutOf(step) {
  const axes = step.axes.map((_, n) => n);
  const inner = axes.filter((n) => !(n < 2 && ["B", "H"].includes(step.axes[n])));
  /** @type {(number | null)[]} */
  const [rows, columns] = inner.length > 1 ? inner.slice(-2) : [null, inner[0] ?? null];
  return { rows, columns, chosen: axes.filter((n) => n !== rows && n !== columns) };
}

/**
 * @param {string} text
 * @param {string} scope
 */
function labelCell(text, scope) {
  const cell = make("th");
  cell.scope = scope;
  cell.append(make("bdi", "", text));
  if (text.length > 12) cell.title = text;
  return cell;
}

/**
 * A table of a step. `operand`: whether it stands beside a result that is made of it. Its methods: `paint()` shows the numbers
 * as they are; `indexAt(cell)` is the index of a cell, `cellAt(index)` the cell of an index, null where it is not here.
 *
 * @param {Step} step
 * @param {boolean} operand
 * @returns {TableView}
 */
export function tableOfStep(step, operand) {
  const { rows, columns, chosen } = layoutOf(step);
  /** @param {number | null} axis */
  const sizeAlong = (axis) => (axis === null ? 1 : step.sizes[axis]);
  const [rowCount, columnCount] = [sizeAlong(rows), sizeAlong(columns)];
  const heat = step.kind !== "allowed" && (rowCount > HEAT.rows || columnCount > HEAT.columns);
  const figure = make("figure", ["table", heat && "heat", columnCount > DENSE && "dense", operand && "operand"].filter(Boolean).join(" "));
  const caption = make("figcaption");
  const table = make("table", step.kind);
  table.setAttribute("role", "grid");
  /** @type {HTMLTableCellElement[][]} */
  const cells = [];
  /** @type {Map<HTMLElement, [number, number]>} */
  const where = new Map(); // from a cell to its row and column
  const head = make("tr");
  head.append(make("td", "corner"));
  for (let c = 0; c < columnCount; c++) head.append(labelCell(columns === null ? "" : labelOf(step, columns, c), "col"));
  const body = make("tbody");
  for (let r = 0; r < rowCount; r++) {
    const line = make("tr");
    line.append(labelCell(rows === null ? "" : labelOf(step, rows, r), "row"));
    cells.push([]);
    for (let c = 0; c < columnCount; c++) {
      const cell = make("td", editable(step) ? "cell open" : "cell");
      cell.tabIndex = -1;
      where.set(cell, [r, c]);
      cells[r].push(cell);
      line.append(cell);
    }
    body.append(line);
  }
  const header = make("thead");
  header.append(head);
  table.append(header, body);
  const scroller = make("div", "scroller");
  scroller.append(table);
  figure.append(caption, scroller);
  const missing = step.more.map((n, axis) => (n && !(step.of && axis < 4) ? `${grouped(n)} more along ${step.axes[axis]}` : ""));
  if (missing.some(Boolean)) figure.append(make("p", "quiet", `… ${missing.filter(Boolean).join(", ")}`));

  const fixed = () => chosen.map((axis) => Math.min(choice.at[axisKey(step, axis)] ?? 0, step.sizes[axis] - 1));
  /** @type {number[]} */
  let shown = []; // the entries of the chosen axes that the table shows
  /**
   * @param {number} r
   * @param {number} c
   */
  const indexOf = (r, c) => step.axes.map((_, axis) =>
    (axis === rows ? r : axis === columns ? c : shown[chosen.indexOf(axis)]));
  /** @param {HTMLElement} cell */
  const positionOf = (cell) => where.get(cell) ?? [0, 0];
  return {
    step, figure, cells, rows, columns, operand, positionOf,
    indexAt: (cell) => indexOf(...positionOf(cell)),
    cellAt: (index) => (chosen.every((axis, n) => index[axis] === shown[n])
      ? cells[rows === null ? 0 : index[rows]]?.[columns === null ? 0 : index[columns]] : null) ?? null,
    turnTo: (index) => {
      const wanted = chosen.map((axis) => index[axis]);
      if (wanted.some((n, k) => n !== shown[k])) paint(wanted);
    },
    paint: () => paint(fixed()),
  };

  /** @param {number[]} entries */
  function paint(entries) {
    shown = entries;
    const names = chosen.filter((axis) => step.sizes[axis] > 1).map((axis) => labelOf(step, axis, shown[chosen.indexOf(axis)]));
    const sizes = [rows, columns].flatMap((axis) => (axis === null || step.axes[axis] === "1" ? []
      : [`${step.axes[axis]} ${step.sizes[axis] + step.more[axis]}`]));
    caption.replaceChildren(make("b", "", step.name), make("span", "quiet", sizes.join(" × ")));
    if (names.length) caption.append(make("bdi", "quiet", names.join(", ")));
    table.setAttribute("aria-label", [step.name, ...names].join(", "));
    const paired = step.axes.includes("Lq") && step.axes.includes("Lk");
    // of the first numbers, so that a number keeps its colour when another one is edited
    const size = step.kind === "number" && (paired || heat) && !isStale(step) ? largestSize(step.first) || largestSize(step.numbers) : null;
    cells.forEach((line, r) => line.forEach((cell, c) => paintCell(cell, indexOf(r, c), size)));
  }

  /**
   * @param {HTMLElement} cell
   * @param {number[]} index
   * @param {number | null} size
   */
  function paintCell(cell, index, size) {
    if (cell.querySelector("input")) return;
    const x = step.numbers[placeOf(index, step.sizes)];
    const text = textOf(x, step.kind);
    if (heat) cell.setAttribute("aria-label", text);
    else if (cell.textContent !== text) cell.textContent = text;
    cell.classList.toggle("blocked", x === -Infinity || (step.kind === "allowed" && !x));
    cell.classList.toggle("allowed", step.kind === "allowed" && Boolean(x));
    cell.classList.toggle("edited", step.given && x !== step.first[placeOf(index, step.sizes)]);
    const colours = size !== null && Number.isFinite(x) ? coloursOf(x, size) : ["", ""];
    [cell.style.backgroundColor, cell.style.color] = colours;
    if (step.kind === "allowed") cell.setAttribute("aria-label", x ? "allowed" : "not allowed");
  }
}
