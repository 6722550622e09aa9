// ---- A text as a list of tokens to choose from. Of a long text, only the part near the view is on the page.

import { make, revealIn } from "../../base/front/dom.js";
import { lastOf } from "../../base/front/numbers.js";
import { stepTo } from "./keys.js";
import { directionOf, visible } from "./words.js";

/** @import { Chunk, Word } from "./types.d.ts" */

const WHOLE = 2000; // a text of at most so many tokens is on the page as a whole
const CHUNK = 256; // about how many tokens of a longer text are added or removed together
const LONG_WORD = 32; // a longer word may be broken at any sign

/**
 * The places where a long text is cut, about every CHUNK tokens: after a line, else a sentence, else a word.
 *
 * @param {Word[]} words
 * @returns {{ from: number, to: number }[]}
 */
function chunksOf(words) {
  if (words.length <= WHOLE) return [{ from: 0, to: words.length }];
  const chunks = [];
  /** @param {number} at */
  const rank = (at) => (words[at].joined ? 0 : words[at - 1].ends ? 3 : !words[at].gap ? 1 : /[.!?。؟]$/u.test(words[at - 1].prose) ? 2 : 1);
  for (let from = 0; from < words.length;) {
    let to = Math.min(words.length, from + CHUNK);
    if (to < words.length) {
      for (let at = to + 32; at > from + CHUNK / 2; at--) if (at < words.length && rank(at) > rank(to)) to = at;
    }
    chunks.push({ from, to });
    from = to;
  }
  return chunks;
}

/** `dress(span, index)` gives a token its colour and its state, whenever it comes onto the page. */
export class Prose {
  /**
   * @param {Word[]} words
   * @param {string} title
   * @param {(span: HTMLElement, index: number) => void} dress
   * @param {{ answer?: number | null, originals?: Record<string, string> }} [given]
   */
  constructor(words, title, dress, { answer = null, originals = {} } = {}) {
    this.words = words;
    this.dress = dress;
    this.answer = answer;
    this.originals = originals;
    this.respelled = false;
    /** @type {HTMLElement[]} those on the page, by their places */
    this.spans = new Array(words.length);
    this.at = 0; // the token from which the keys move
    this.element = make("div", "prose");
    this.element.setAttribute("role", "listbox");
    this.element.setAttribute("aria-multiselectable", "true");
    this.element.setAttribute("aria-label", `${title}: arrow keys choose a token, with Shift several`);
    this.element.dir = directionOf(words);
    this.element.lang = "";
    this.sheet = make("div", "sheet");
    this.element.append(this.sheet);
    /** @type {Chunk[]} */
    this.chunks = chunksOf(words).map((chunk) => ({ ...chunk, box: make("div", "chunk"), filled: false }));
    this.sheet.append(...this.chunks.map(({ box }) => box));
    this.windowed = this.chunks.length > 1;
    if (!this.windowed) this.fill(this.chunks[0]);
    let asked = false;
    this.moved = () => {}; // called after the part in sight has changed
    this.element.addEventListener("scroll", () => {
      if (asked) return;
      asked = true;
      requestAnimationFrame(() => {
        asked = false;
        this.look();
        this.moved();
      });
    });
  }

  /** @param {Chunk} chunk */
  fill(chunk) {
    if (chunk.filled) return;
    chunk.filled = true;
    chunk.box.style.height = "";
    if (this.windowed) chunk.box.dataset.from = String(chunk.from);
    let word = null;
    for (let index = chunk.from; index < chunk.to; index++) {
      const token = this.words[index];
      if (token.gap && index > 0) chunk.box.append(" ");
      if (index === this.answer) chunk.box.append(make("br"), make("span", "seam", "answer"), " ");
      if (!token.joined || word === null) word = this.wordFrom(index, chunk);
      word.append(this.span(index));
      if (token.ends) chunk.box.append(make("br"));
    }
  }

  /**
   * The element for the tokens of a word: an element of their own if there are several.
   *
   * @param {number} index
   * @param {Chunk} given
   */
  wordFrom(index, { box, to }) {
    let end = index + 1;
    let signs = this.words[index].prose.length;
    for (; end < to && this.words[end].joined; end++) signs += this.words[end].prose.length;
    if (end === index + 1) return box;
    const word = make("span", signs > LONG_WORD ? "word long" : "word");
    box.append(word);
    return word;
  }

  /** @param {number} index */
  span(index) {
    const token = this.words[index];
    const original = this.respelled ? this.originals[index] : undefined;
    const span = make("span", "token", original === undefined ? token.prose : visible(original));
    if (token.special) span.classList.add("special");
    else if (!token.plain) span.classList.add("sign");
    if (original !== undefined) span.classList.add("original");
    if (this.answer !== null) span.classList.add(index < this.answer ? "prompt" : "answer");
    span.setAttribute("role", "option");
    if (this.windowed) {
      span.setAttribute("aria-posinset", String(index + 1));
      span.setAttribute("aria-setsize", String(this.words.length));
    }
    span.dataset.index = String(index);
    this.spans[index] = span;
    this.dress(span, index);
    return span;
  }

  /** @param {Chunk} chunk */
  empty(chunk) {
    if (!chunk.filled) return;
    chunk.filled = false;
    chunk.height = chunk.box.offsetHeight;
    chunk.box.style.height = `${chunk.height}px`;
    chunk.box.replaceChildren();
    for (let index = chunk.from; index < chunk.to; index++) delete this.spans[index];
  }

  /**
   * @param {number} index
   * @returns {Chunk}
   */
  chunkOf(index) {
    return this.chunks.find(({ to }) => index < to) ?? lastOf(this.chunks);
  }

  /** Gives the parts that are not on the page the height that they will have, as far as it is known. */
  space() {
    const measured = this.chunks.filter(({ filled, height }) => filled || height);
    const heights = measured.reduce((sum, { box }) => sum + box.offsetHeight, 0);
    const tokens = measured.reduce((sum, { from, to }) => sum + to - from, 0);
    const each = tokens ? heights / tokens : 2;
    for (const { filled, height, box, from, to } of this.chunks) {
      if (!filled && !height) box.style.height = `${Math.round(each * (to - from))}px`;
    }
  }

  /** Puts the part in sight, a screen before and after it, and the token of the keys on the page, and removes the rest. */
  look() {
    if (!this.windowed) return;
    this.space();
    const { scrollTop, clientHeight } = this.element;
    const places = this.chunks.map(({ box }) => [box.offsetTop, box.offsetHeight]);
    const focus = this.chunkOf(this.at);
    this.chunks.forEach((chunk, number) => {
      const [top, height] = places[number];
      const near = top < scrollTop + 2 * clientHeight && top + height > scrollTop - clientHeight;
      const far = top > scrollTop + 3 * clientHeight || top + height < scrollTop - 2 * clientHeight;
      if (near || chunk === focus) this.fill(chunk);
      else if (far) this.empty(chunk);
    });
  }

  /** Forgets the heights, which were those of another width. */
  resized() {
    for (const chunk of this.chunks) chunk.height = undefined;
    this.look();
  }

  /**
   * Makes the keys move from a token, which is put on the page.
   *
   * @param {number} index
   */
  stand(index) {
    if (this.spans[this.at]) this.spans[this.at].tabIndex = -1;
    this.at = index;
    this.fill(this.chunkOf(index));
    this.spans[index].tabIndex = 0;
    return this.spans[index];
  }

  /**
   * Scrolls a token into sight.
   *
   * @param {number} index
   */
  reveal(index) {
    const chunk = this.chunkOf(index);
    this.fill(chunk);
    if (this.windowed) this.space();
    revealIn(this.element, this.spans[index]);
    if (!this.windowed) return;
    this.look();
    this.fill(chunk);
    revealIn(this.element, this.spans[index]); // parts that were added above may be taller than expected
  }

  /**
   * The token to which a key leads, or -1.
   *
   * @param {string} key
   */
  step(key) {
    const last = this.words.length - 1;
    if (key === "Home" || key === "End") return key === "Home" ? 0 : last;
    const here = this.chunks.indexOf(this.chunkOf(this.at));
    const near = this.chunks.slice(Math.max(0, here - 1), here + 2);
    for (const chunk of near) this.fill(chunk);
    const from = near[0].from;
    const spans = this.spans.slice(from, lastOf(near).to);
    if (key !== "PageDown" && key !== "PageUp") {
      const to = stepTo(key, this.at - from, spans);
      return to < 0 ? -1 : from + to;
    }
    const box = this.spans[this.at].getBoundingClientRect();
    const way = (key === "PageDown" ? 0.9 : -0.9) * this.element.clientHeight;
    const found = spans.findIndex((span) => span.getBoundingClientRect().top >= box.top + way);
    return found < 0 ? lastOf(near).to - 1 : from + found;
  }

  /**
   * Shows tokens the tokenizer does not know as they were spelled, or as they are.
   *
   * @param {boolean} on
   */
  respell(on) {
    if (on === this.respelled) return;
    this.respelled = on;
    for (const chunk of this.chunks.filter(({ filled }) => filled)) {
      chunk.box.replaceChildren();
      chunk.filled = false;
      this.fill(chunk);
    }
  }
}
