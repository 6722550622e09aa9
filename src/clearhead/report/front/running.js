// ---- Words as running text, with spaces where they belong.

import { make } from "../../base/front/dom.js";

/** @import { Word } from "./types.d.ts" */

/**
 * Appends words to a paragraph: an element each, which `mark` may dress.
 *
 * @param {HTMLElement} text
 * @param {Word[]} words
 * @param {(span: HTMLElement, index: number) => void} mark
 */
export function run(text, words, mark) {
  words.forEach(({ prose, gap, special, ends }, at) => {
    if (gap && at) text.append(" ");
    const span = make("span", special ? "special" : "", prose);
    mark(span, at);
    text.append(span);
    if (ends) text.append(make("br"));
  });
}
