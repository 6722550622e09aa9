// ---- From a number to a colour, and the ink that reads on it. More is always further from the background.

/** @import { Table } from "./types.d.ts" */

const ramps = {
  light: ["#ffffff", "#e6f2d5", "#b9dfc3", "#63b8b6", "#2b7fae", "#1c4790", "#10184a"],
  dark: ["#1a1f28", "#1c3a5e", "#1d5f86", "#25899a", "#4fb88c", "#a5d76e", "#f8f3b4"],
};

/** @param {string} hex */
export const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/**
 * 256 colours, three bytes each, evenly between the stops.
 *
 * @param {string[]} stops
 * @returns {Table}
 */
export function tableOf(stops) {
  const table = new Uint8ClampedArray(256 * 3);
  const colours = stops.map(channels);
  for (let step = 0; step < 256; step++) {
    const at = (step / 255) * (colours.length - 1);
    const low = Math.min(Math.floor(at), colours.length - 2);
    for (let c = 0; c < 3; c++) {
      table[3 * step + c] = colours[low][c] + (at - low) * (colours[low + 1][c] - colours[low][c]);
    }
  }
  return table;
}

export const tables = { light: tableOf(ramps.light), dark: tableOf(ramps.dark) };

/**
 * Black or white, whichever reads better on this step: always at least 4.5 to 1.
 *
 * @param {Table} table
 * @param {number} step
 */
export function inkOn(table, step) {
  const [r, g, b] = [0, 1, 2].map((c) => {
    const value = table[3 * step + c] / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

/**
 * @param {Table} table
 * @param {number} step
 */
export const cssColour = (table, step) => `rgb(${table[3 * step]} ${table[3 * step + 1]} ${table[3 * step + 2]})`;
