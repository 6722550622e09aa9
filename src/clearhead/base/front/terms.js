// ---- A number written out: pieces of text, those that are a number of a step with the place where it stands.
//
// A term is {binds, pieces}: a piece is a string or {text, step, index}. `binds` says how tightly, so that brackets
// stand where they are needed and nowhere else.

import { grouped } from "./numbers.js";

/** @import { Computed, Piece, Source, Term } from "./types.d.ts" */

export const BINDS = { compare: 0, sum: 1, product: 2, unary: 3, power: 4, atom: 5 };
let mostTerms = 8; // the most terms of a sum that are written out: those with the largest size

/** @param {number} n */
export const setMostTerms = (n) => { mostTerms = n; };

/**
 * @param {string} text
 * @returns {Term}
 */
const atom = (text) => ({ binds: BINDS.atom, pieces: [text] });

/**
 * A number that stands in a step, or in the code; brackets go round a negative one as round a sum.
 *
 * @param {string} text
 * @param {Omit<Source, "text"> | null} [source]
 * @returns {Term}
 */
export function leaf(text, source = null) {
  const piece = source ? { text, ...source } : text;
  return { binds: text.startsWith("-") ? BINDS.sum : BINDS.atom, pieces: [piece] };
}

/**
 * @param {Term} term
 * @param {number} least
 */
export const bracketed = (term, least) => (term.binds < least ? ["(", ...term.pieces, ")"] : term.pieces);

/**
 * @param {Term} left
 * @param {string} sign
 * @param {Term} right
 * @param {number} binds
 * @param {number} leastLeft
 * @param {number} leastRight
 * @returns {Term}
 */
export function between(left, sign, right, binds, leastLeft, leastRight) {
  return { binds, pieces: [...bracketed(left, leastLeft), sign, ...bracketed(right, leastRight)] };
}

/**
 * @param {Term} a
 * @param {Term} b
 * @returns {Term}
 */
export const times = (a, b) => between(a, "·", b, BINDS.product, BINDS.product, BINDS.product);

/**
 * @param {string} name
 * @param {...Term} terms
 * @returns {Term}
 */
export const called = (name, ...terms) => ({
  binds: BINDS.atom,
  pieces: [`${name}(`, ...terms.flatMap((term, n) => (n ? [", ", ...term.pieces] : term.pieces)), ")"],
});

/**
 * The places of the largest of these numbers, in their order, where there are more than are written out.
 *
 * @param {number[]} values
 */
function largest(values) {
  const places = values.map((_, n) => n);
  if (values.length <= mostTerms) return places;
  /** @param {number} n */
  const size = (n) => (Number.isNaN(values[n]) ? Infinity : Math.abs(values[n]));
  return places.sort((a, b) => size(b) - size(a) || a - b).slice(0, mostTerms).sort((a, b) => a - b);
}

/**
 * A sum of `values`, whose terms `termOf(n)` writes out; `more` are not in this page.
 *
 * @param {number[]} values
 * @param {(n: number) => Term} termOf
 * @param {number} more
 * @param {string} [sign]
 * @returns {Term}
 */
export function sumOf(values, termOf, more, sign = " + ") {
  const shown = largest(values);
  const left = values.length - shown.length + more;
  const single = values.length === 1 && !left;
  const pieces = [];
  for (const n of shown) {
    const term = termOf(n);
    pieces.push(...(pieces.length ? [sign, ...bracketed(term, BINDS.product)]
      : single ? term.pieces : bracketed(term, BINDS.sum)));
  }
  if (left) pieces.push(`${sign}… (${grouped(left)} more)`);
  if (!values.length && !left) return atom("0");
  return { binds: single ? termOf(0).binds : BINDS.sum, pieces };
}

/** @param {Piece[]} pieces */
export const plainText = (pieces) => pieces.map((piece) => (typeof piece === "string" ? piece : piece.text)).join("");

/**
 * All the places that a number is made of, as pieces: also those of terms that are not written out.
 *
 * @param {Computed} node
 * @param {number[]} index
 * @returns {Source[]}
 */
export function placesIn(node, index) {
  const before = mostTerms;
  mostTerms = Infinity;
  try {
    return node.term(index).pieces.filter((piece) => typeof piece !== "string");
  } finally {
    mostTerms = before;
  }
}
