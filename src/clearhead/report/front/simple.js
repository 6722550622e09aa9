// ---- The simple view, on which a page opens: the text, the map of one head and the strongest tokens. "More" shows the rest.

/**
 * @import { Change, More, Readers } from "./types.d.ts"
 * @import { View } from "./view.js"
 */

/** @type {More[]} what the whole page alone shows */
const WHOLE = ["by", "against", "show", "only", "pins", "a", "b", "lines", "meaning", "colours"];

/**
 * @satisfies {Readers} "1": the whole page, "0": the simple view. An address without it is of the whole page where it
 * names what that page alone shows, and where two recordings are compared.
 */
export const ADDRESS_OF_ALL = {
  all: (text, run, parts) => (text === "0" || text === "1" ? text
    : run.beside.length > 0 || WHOLE.some((name) => parts.has(name)) ? "1" : null),
};

/** @param {Change} change */
export const needsAll = (change) => WHOLE.some((name) => change[name]);

/** @param {View} view */
export const isSimple = (view) => view.all !== "1";

/**
 * Whether arcs are drawn: in the simple view unless they were turned off, else where they were turned on.
 *
 * @param {View} view
 */
export const withArcs = (view) => (view.arcs === null ? isSimple(view) : view.arcs === "1");

/**
 * The change that turns the arcs on or off.
 *
 * @param {View} view
 * @returns {Change}
 */
export const turnArcs = (view) => ({ arcs: withArcs(view) !== isSimple(view) ? null : withArcs(view) ? "0" : "1" });
