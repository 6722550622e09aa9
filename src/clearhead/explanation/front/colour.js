// ---- The colour of a cell: one ramp from 0 up, another from 0 down, so that the sign is seen without its text.

import { cssColour, inkOn, tableOf, tables } from "../../base/front/ramp.js";
import { Theme } from "../../base/front/theme.js";
import { refresh } from "./choice.js";

const negativeRamps = {
  light: tableOf(["#ffffff", "#fdebd2", "#f9c896", "#ec9455", "#c95f2c", "#953a1a", "#5a1d0c"]),
  dark: tableOf(["#1a1f28", "#4a2f25", "#75402a", "#a95a33", "#d98850", "#f2bd8a", "#fde9d0"]),
};

/** The theme of the page, which is painted again when the theme changes. */
export const theme = new Theme(document.documentElement, refresh);

/**
 * [background, ink] of a number among numbers of at most this size.
 *
 * @param {number} x
 * @param {number} size
 * @returns {[string, string]}
 */
export function coloursOf(x, size) {
  const name = theme.dark ? "dark" : "light";
  const table = x < 0 ? negativeRamps[name] : tables[name];
  const step = Math.round(255 * Math.min(1, size > 0 ? Math.abs(x) / size : 0));
  return [cssColour(table, step), inkOn(table, step)];
}
