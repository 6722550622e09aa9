// ---- A step's numbers as a table: one sequence and head, with the names of its rows and columns.

import { grouped, placeOf, textOf } from "../../../base/front/numbers.js";
import { choice } from "./choice.js";
import { coloursOf } from "./colour.js";
import { data } from "./data.js";
import { editable, isStale, largestSize } from "./steps.js";

const HEAT = { rows: 16, columns: 12 }; // a larger table is a heat map: the number of a cell is said when it is chosen
const DENSE = 4; // a table of more columns is set smaller
export const LABELLED = ["B", "H", "Lq", "Lk", "L"];

/** Text in which characters that print nothing, or turn the line around, are seen. */
export const visible = (text) => text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (character) => {
  const code = character.codePointAt(0).toString(16);
  return code.length <= 2 ? `\\x${code.padStart(2, "0")}` : `\\u${code.padStart(4, "0")}`;
});

/** What an entry of an axis is called. */
export function labelOf(step, axis, n) {
  const name = step.axes[axis];
  const labels = data.labels[name];
  if (!labels) return name === "1" ? "" : String(n);
  if (step.of && axis < 4) return visible(labels[step.of[axis]] ?? labels[0]);
  return step.sizes[axis] === 1 && labels.length > 1 ? "every" : visible(labels[n]);
}

/** The name under which the chosen entry of an axis is kept; an axis of the same name twice has two. */
export function axisKey(step, axis) {
  const name = step.axes[axis];
  const before = step.axes.slice(0, axis).filter((other) => other === name).length;
  return before ? `${name}${before + 1}` : name;
}

/** The axes of a step: those chosen above the table, its rows and its columns (null: one row, one column). */
function layoutOf(step) {
  const axes = step.axes.map((_, n) => n);
  const inner = axes.filter((n) => !(n < 2 && ["B", "H"].includes(step.axes[n])));
  const [rows, columns] = inner.length > 1 ? inner.slice(-2) : [null, inner[0] ?? null];
  return { rows, columns, chosen: axes.filter((n) => n !== rows && n !== columns) };
}

export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function labelCell(text, scope) {
  const cell = element("th");
  cell.scope = scope;
  cell.append(element("bdi", "", text));
  if (text.length > 12) cell.title = text;
  return cell;
}

/**
 * A table of a step. `operand`: it stands beside a result that is made of it. Its methods: `paint()` shows the numbers
 * as they are; `indexAt(cell)` is the index of a cell, `cellAt(index)` the cell of an index, null where it is not here.
 */
export function tableOfStep(step, operand) {
  const { rows, columns, chosen } = layoutOf(step);
  const sizeAlong = (axis) => (axis === null ? 1 : step.sizes[axis]);
  const [rowCount, columnCount] = [sizeAlong(rows), sizeAlong(columns)];
  const heat = step.kind !== "allowed" && (rowCount > HEAT.rows || columnCount > HEAT.columns);
  const figure = element("figure", ["table", heat && "heat", columnCount > DENSE && "dense", operand && "operand"].filter(Boolean).join(" "));
  const caption = element("figcaption");
  const table = element("table", step.kind);
  table.setAttribute("role", "grid");
  const cells = [];
  const where = new Map(); // from a cell to its row and column
  const head = element("tr");
  head.append(element("td", "corner"));
  for (let c = 0; c < columnCount; c++) head.append(labelCell(columns === null ? "" : labelOf(step, columns, c), "col"));
  const body = element("tbody");
  for (let r = 0; r < rowCount; r++) {
    const line = element("tr");
    line.append(labelCell(rows === null ? "" : labelOf(step, rows, r), "row"));
    cells.push([]);
    for (let c = 0; c < columnCount; c++) {
      const cell = element("td", editable(step) ? "cell open" : "cell");
      cell.tabIndex = -1;
      where.set(cell, [r, c]);
      cells[r].push(cell);
      line.append(cell);
    }
    body.append(line);
  }
  const header = element("thead");
  header.append(head);
  table.append(header, body);
  const scroller = element("div", "scroller");
  scroller.append(table);
  figure.append(caption, scroller);
  const missing = step.more.map((n, axis) => (n && !(step.of && axis < 4) ? `${grouped(n)} more along ${step.axes[axis]}` : ""));
  if (missing.some(Boolean)) figure.append(element("p", "quiet", `… ${missing.filter(Boolean).join(", ")}`));

  const fixed = () => chosen.map((axis) => Math.min(choice.at[axisKey(step, axis)] ?? 0, step.sizes[axis] - 1));
  let shown = null; // the entries of the chosen axes that the table shows
  const indexOf = (r, c) => step.axes.map((_, axis) =>
    (axis === rows ? r : axis === columns ? c : shown[chosen.indexOf(axis)]));
  const view = {
    step, figure, cells, rows, columns, operand,
    indexAt: (cell) => indexOf(...where.get(cell)),
    cellAt: (index) => (chosen.every((axis, n) => index[axis] === shown[n])
      ? cells[rows === null ? 0 : index[rows]]?.[columns === null ? 0 : index[columns]] : null) ?? null,
    positionOf: (cell) => where.get(cell),
    turnTo: (index) => {
      const wanted = chosen.map((axis) => index[axis]);
      if (wanted.some((n, k) => n !== shown[k])) paint(wanted);
    },
    paint: () => paint(fixed()),
  };

  function paint(entries) {
    shown = entries;
    const names = chosen.filter((axis) => step.sizes[axis] > 1).map((axis) => labelOf(step, axis, shown[chosen.indexOf(axis)]));
    const sizes = [rows, columns].filter((axis) => axis !== null && step.axes[axis] !== "1")
      .map((axis) => `${step.axes[axis]} ${step.sizes[axis] + step.more[axis]}`);
    caption.replaceChildren(element("b", "", step.name), element("span", "quiet", sizes.join(" × ")));
    if (names.length) caption.append(element("bdi", "quiet", names.join(", ")));
    table.setAttribute("aria-label", [step.name, ...names].join(", "));
    const paired = step.axes.includes("Lq") && step.axes.includes("Lk");
    const size = step.kind === "number" && (paired || heat) && !isStale(step) ? largestSize(step.numbers) : null;
    cells.forEach((line, r) => line.forEach((cell, c) => paintCell(cell, indexOf(r, c), size)));
  }

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

  return view;
}
