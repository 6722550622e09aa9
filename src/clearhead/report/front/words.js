// ---- Tokens and numbers in readable form. They are strings, and reach the page as text.

import { grouped } from "../../base/front/numbers.js";
import { onlyByteNames, onlyBytes, special, textsOfBytes } from "./bytes.js";
import { equalShare, mayLook, rankOf } from "./weights.js";

/** @import { Look, Names, Word } from "./types.d.ts" */

/** @type {Record<string, string>} */
const visibleSigns = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };

// Controls, marks that reorder text, and signs with no shape. Joiners inside emoji and words stay.
const unseenSigns = /[\p{Cc}\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/gu;
const shapeless = /^[\s\p{Cf}\p{Mn}\p{Cc}\ufe00-\ufe0f]+$/u;
const closing = /^[.,;:!?،؛؟۔、。)\]}%’”'…-]+$/u;
const opening = /^[([{$#“‘'-]+$/u;
const inWord = /^[\p{L}\p{M}\p{N}⟩][\p{L}\p{M}\p{N}⟨]/u; // two signs with a word going on between them
const unspaced = /\p{Script=Han}|\p{Script=Hiragana}|\p{Script=Katakana}|\p{Script=Thai}/u;

/** @param {string} sign */
export const codePoint = (sign) => `⟨U+${(sign.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0")}⟩`;

/**
 * The text with visible signs for white space alone or at line ends, and for controls.
 *
 * @param {string} text
 */
export function visible(text) {
  if (/^[!-~]+$/.test(text)) return text; // most tokens: a text of a hundred thousand is read at once
  if (text === "") return "∅";
  if (shapeless.test(text)) return Array.from(text, (sign) => visibleSigns[sign] || codePoint(sign)).join("");
  return text
    .replace(/[\n\r\t\u00a0]/g, (sign) => visibleSigns[sign])
    .replace(unseenSigns, codePoint);
}

/**
 * The way a tokenizer marks words, found from its tokens. With Ġ it writes bytes.
 *
 * @param {string[]} tokens
 */
function markingOf(tokens) {
  if (tokens.some((token) => token.startsWith("Ġ")) || onlyBytes(tokens)) return "Ġ";
  if (tokens.some((token) => token.startsWith("▁"))) return "▁";
  if (tokens.some((token) => token.length > 1 && token.startsWith(" "))) return " ";
  return "words"; // with ## for a word's later pieces
}

/**
 * A token as read: its text, its name, whether a space comes before it, whether it continues the word before.
 *
 * @param {string} token
 * @param {string} marking
 * @param {string} [before]
 */
function readToken(token, marking, before = ".") {
  if (marking !== "words") {
    const text = token.replaceAll(marking, " ");
    const gap = text.startsWith(" ") && text.length > 1;
    const raw = gap && !shapeless.test(text) ? text.slice(1) : text;
    return { raw, label: visible(raw), gap, joined: !gap && inWord.test(`${before.slice(-1)}${raw}`) && !unspaced.test(raw) };
  }
  const piece = token.startsWith("##") && token.length > 2;
  const glued = piece || shapeless.test(token) || closing.test(token) || opening.test(before) ||
    shapeless.test(before) || (unspaced.test(token) && unspaced.test(before));
  return { raw: piece ? token.slice(2) : token, label: visible(token), gap: !glued, joined: piece };
}

/**
 * A text as the page shows it. `prose`: a token in running text; `label`: by itself; `gap`: a space comes before it;
 * `joined`: it goes on with the word before; `ends`: a line ends after it; `plain`: nothing in it is replaced by a sign;
 * `repeated`: its label needs its position to be told apart.
 *
 * @param {string[]} tokens
 * @returns {Word[]}
 */
export function readText(tokens) {
  const marking = markingOf(tokens);
  const texts = marking === "Ġ" || marking === "▁" ? textsOfBytes(tokens, marking) : tokens;
  const read = texts.map((text, index) => {
    const one = readToken(text, marking, texts[index - 1]);
    const own = special.test(text);
    const prose = onlyByteNames.test(text) ? "▫" : visible(one.raw);
    const joined = one.joined && !own && !special.test(texts[index - 1] ?? "[]");
    return {
      ...one, joined, special: own, prose, plain: prose === one.raw && !own, ends: one.raw.includes("\n"), repeated: false,
    };
  });
  /** @type {Map<string, number>} */
  const times = new Map();
  for (const { label } of read) times.set(label, (times.get(label) ?? 0) + 1);
  for (const one of read) one.repeated = (times.get(one.label) ?? 0) > 1;
  return read;
}

const rightToLeft = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

/**
 * The writing direction of most letters of a text, without special tokens.
 *
 * @param {Word[]} words
 */
export function directionOf(words) {
  if (!words.some(({ prose }) => rightToLeft.test(prose))) return "ltr";
  let surplus = 0;
  for (const { prose, plain } of words) {
    if (!plain) continue;
    for (const [letter] of prose.matchAll(/\p{L}/gu)) surplus += rightToLeft.test(letter) ? 1 : -1;
  }
  return surplus > 0 ? "rtl" : "ltr";
}

/**
 * @param {string} text
 * @param {number} most
 */
export const shortened = (text, most) => {
  const signs = Array.from(text);
  return signs.length > most ? `${signs.slice(0, most - 1).join("")}…` : text;
};

/**
 * A token's name in a sentence, fenced so that its writing direction stays its own. `other`: what another text has there.
 *
 * @param {Word[]} words
 * @param {number} index
 */
export function nameOf(words, index) {
  const { label, repeated, other, at } = words[index];
  const names = [label, ...(other === undefined ? [] : [other])].map((name) => `\u2068${shortened(name, 24)}\u2069`);
  return `${names.join(" / ")}${repeated ? ` (${at ?? index})` : ""}`;
}

/**
 * A weight in percent with few digits: 53.1%, 3.6%, 0.83%, 0.0012%, < 0.00001%.
 *
 * @param {number} weight
 */
export function percent(weight) {
  const value = 100 * weight;
  if (Number.isNaN(value)) return "not a number";
  if (value === 0) return "0%";
  if (value >= 1) return `${value.toFixed(1).replace("100.0", "100")}%`;
  return value >= 1e-5 ? `${Number(value.toPrecision(2))}%` : "< 0.00001%";
}

/**
 * @param {number} value
 * @param {number} digits
 */
export const signed = (value, digits) => value.toFixed(digits).replace("-", "−");

/**
 * A ratio: 4.3 ×, 0.012 ×, 120 ×, < 0.001 ×.
 *
 * @param {number} ratio
 */
export const times = (ratio) => ratio > 0 && ratio < 0.001 ? "< 0.001 ×" : `${ratio >= 100 ? Math.round(ratio) : Number(ratio.toPrecision(2))} ×`;

const plurals = { query: "queries", key: "keys", head: "heads" };

/**
 * @param {number} count
 * @param {"query" | "key" | "head"} noun
 */
export const plural = (count, noun) => `${grouped(count)} ${count === 1 ? noun : plurals[noun]}`;

/**
 * "A → B", the query first. `names`: the words of the queries, and of the keys.
 *
 * @param {Names} names
 * @param {number} i
 * @param {number} j
 */
export const pairName = (names, i, j) => `${nameOf(names[0], i)} → ${nameOf(names[1], j)}`;

/**
 * The place of a pair among those of its query, or with view "in" of its key: "rank 3 of the 120 keys of “it”, 4.3 ×
 * uniform attention". It stands beside the pair's name, at the side and under the map.
 *
 * @param {Look} look
 * @param {number} other
 * @param {Names} names
 */
export function placeWords(look, other, names) {
  const out = look.view === "out";
  const [i, j] = out ? [look.token, other] : [other, look.token];
  if (!mayLook(look.head, i, j)) return "masked: the query may not see this key";
  const rank = `rank ${grouped(rankOf(look, other))} of the ${plural(look.allowed.length, out ? "key" : "query")}`;
  const whose = `${out ? "of" : "that see"} “${nameOf(names[out ? 0 : 1], look.token)}”`;
  return `${rank} ${whose}, ${times(look.weights[other] / equalShare(look.head, i))} uniform attention`;
}
