// ---- Words found in the text.

import { closestTo, onKey, withModifier } from "../../base/front/dom.js";
import { grouped } from "../../base/front/numbers.js";

/**
 * @import { Page } from "./mount.js"
 * @import { TextPane } from "./text.js"
 * @import { Listing, Word } from "./types.d.ts"
 */

/**
 * The runs of tokens, [first, last], that contain the sought text in upper or lower case.
 *
 * @param {Word[]} words
 * @param {string} sought
 * @returns {[number, number][]}
 */
function matchesOf(words, sought) {
  const wanted = sought.toLowerCase();
  if (wanted.trim() === "") return [];
  /** @type {number[]} */
  const starts = [];
  let text = "";
  words.forEach(({ prose, gap }, index) => {
    if (gap && index > 0) text += " ";
    starts.push(text.length);
    text += prose.toLowerCase();
  });
  /**
   * @param {number} place
   * @param {number} from
   */
  const owner = (place, from) => {
    let at = from;
    while (at + 1 < starts.length && starts[at + 1] <= place) at++;
    return at;
  };
  /** @type {[number, number][]} */
  const found = [];
  let near = 0;
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
    near = owner(at + wanted.length - wanted.trimStart().length, near);
    found.push([near, owner(at + wanted.trimEnd().length - 1, near)]);
  }
  return found;
}

export class Find {
  /**
   * @param {Page} page
   * @param {TextPane} pane
   */
  constructor(page, pane) {
    this.page = page;
    this.pane = pane;
    /** @type {[Listing, [number, number]][]} */
    this.matches = [];
    this.current = -1;
    this.form = page.find("find");
    this.field = page.find("find-words", HTMLInputElement);
    page.find("find-open").addEventListener("click", () => this.open());
    page.find("find-next").addEventListener("click", () => this.go(1));
    page.find("find-before").addEventListener("click", () => this.go(-1));
    page.find("find-close").addEventListener("click", () => this.close());
    this.field.addEventListener("input", () => this.seek());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
      else if (event.key === "Enter" && event.target === this.field) this.go(event.shiftKey ? -1 : 1);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    onKey(page.root, (event) => {
      const typing = closestTo(event.target, "input:not([type=radio]), textarea, select, dialog");
      if (event.key !== "/" || typing || withModifier(event)) return;
      event.preventDefault();
      this.open();
    });
  }

  open() {
    this.form.hidden = false;
    this.field.focus();
    this.field.select();
    this.seek();
  }

  /** Closes, with the focus on the token that was found, or on the chosen one. */
  close() {
    const [listing, [index]] = this.matches[this.current] ?? [this.pane.holding, [this.page.view.own]];
    this.form.hidden = true;
    this.matches = [];
    this.current = -1;
    this.pane.dressAll();
    listing.prose.stand(index).focus();
  }

  seek() {
    this.matches = this.pane.listings.flatMap((listing) =>
      matchesOf(listing.prose.words, this.field.value).map((match) => /** @type {[Listing, [number, number]]} */ ([listing, match])));
    const { holding } = this.pane;
    const from = this.page.view.own;
    this.current = this.matches.findIndex(([listing, [, last]]) => listing === holding && last >= from) - 1;
    if (this.current < -1) this.current = -1;
    this.go(1);
  }

  /** @param {1 | -1} way */
  go(way) {
    const count = this.matches.length;
    if (count > 0) {
      this.current = (this.current + way + count) % count;
      const [listing, [first]] = this.matches[this.current];
      listing.prose.reveal(first);
    }
    this.pane.dressAll();
    this.page.find("find-count").textContent = count > 0 ? `${this.current + 1} of ${grouped(count)}`
      : this.field.value.trim() === "" ? "" : "not found";
  }

  /**
   * "found" or "found current" where a token is in a match.
   *
   * @param {Listing} listing
   * @param {number} index
   */
  markOf(listing, index) {
    const at = this.matches.findIndex(([one, [first, last]]) => one === listing && first <= index && index <= last);
    return at < 0 ? "" : at === this.current ? "found current" : "found";
  }
}
