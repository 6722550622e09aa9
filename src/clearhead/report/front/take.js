// ---- Choosing tokens of a text by pointer and by keys, one or several.

import { closestTo } from "../../base/front/dom.js";
import { rangesOf } from "./chosen.js";
import { pairOf } from "./view.js";
import { mayLook, weightOf } from "./weights.js";
import { pairName, percent, visible } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { TextPane } from "./text.js"
 * @import { Listing } from "./types.d.ts"
 */

/**
 * Listens to the text of a listing, and changes the choices of the page.
 *
 * @param {Listing} listing
 * @param {TextPane} pane
 */
export function listenTo(listing, pane) {
  const { page } = pane;
  const { prose } = listing;
  const { element } = prose;
  /** @param {EventTarget | null} node */
  const at = (node) => {
    const span = closestTo(node, ".token");
    return span && element.contains(span) ? Number(span.dataset.index) : null;
  };
  /**
   * @param {number} from
   * @param {number} to
   */
  const run = (from, to) => Array.from({ length: Math.abs(to - from) + 1 }, (_, step) => Math.min(from, to) + step);
  const holds = () => listing === pane.holding;

  /**
   * @param {number} token
   * @param {number[]} tokens
   * @param {boolean} step
   */
  const take = (token, tokens, step) => page.choose({
    view: pane.viewFrom(listing), token, tokens: tokens.length > 1 ? rangesOf(tokens) : null, pair: null,
  }, step);
  /**
   * With Alt: choose its pair with the chosen token. With Shift: choose all tokens up to it. With Control: add or remove it.
   *
   * @param {number} index
   * @param {MouseEvent | KeyboardEvent} event
   * @param {boolean} step
   */
  const takeWith = (index, event, step) => {
    const { i, j } = pane.previewed(listing, index);
    if (event.altKey && i !== null && j !== null) return void page.choose(pairOf(page.view.view, i, j), step);
    if (event.shiftKey && holds()) take(page.view.own, run(page.view.own, index), step);
    else if ((event.ctrlKey || event.metaKey) && holds()) {
      const tokens = new Set(pane.chosen);
      if (tokens.size > 1 && tokens.has(index)) tokens.delete(index);
      else tokens.add(index);
      take(tokens.has(index) ? index : Math.min(...tokens), [...tokens], step);
    } else take(index, [index], step);
  };

  /** @type {number | null} */
  let from = null; // the token where the pointer went down
  /** @type {number | null} */
  let to = null; // the token to which the pointer was moved from there
  /** @param {boolean} on */
  const mark = (on) => {
    if (from !== null && to !== null) for (const index of run(from, to)) prose.spans[index]?.classList.toggle("taking", on);
  };
  element.addEventListener("pointerdown", (event) => {
    const drawn = event.button === 0 && event.pointerType !== "touch" && !event.shiftKey && !event.ctrlKey && !event.metaKey;
    clearTimeout(pane.resting);
    from = drawn ? at(event.target) : null;
    to = null;
  });
  element.addEventListener("pointermove", (event) => {
    const over = at(page.root.elementFromPoint(event.clientX, event.clientY));
    if (from !== null && event.buttons & 1 && over !== null && (to !== null || over !== from)) {
      element.setPointerCapture(event.pointerId);
      mark(false);
      to = over;
      mark(true);
    }
    if (to !== null || !page.shown?.look) return;
    if (over === listing.over || (over === null && pane.previewing)) return; // between two words a preview stays
    pane.point(listing, over, event.pointerType !== "touch");
    listing.over = over;
    if (over !== null) prose.spans[over].title = spokenOf(page, listing, pane, over);
  });
  element.addEventListener("pointerup", () => {
    if (from === null || to === null) return;
    mark(false);
    const [first, last] = [from, to];
    from = null;
    setTimeout(() => { to = null; }, 0); // after the click that ends it
    take(first, run(first, last), true);
  });
  element.addEventListener("pointercancel", () => {
    mark(false);
    from = to = null;
  });
  element.addEventListener("pointerleave", () => {
    listing.over = null;
    if (page.shown?.look) pane.point(listing, null);
  });
  element.addEventListener("click", (event) => {
    const index = at(event.target);
    if (index === null || to !== null) return;
    prose.stand(index).focus({ preventScroll: true });
    takeWith(index, event, true);
  });
  element.addEventListener("keydown", (event) => {
    const here = at(page.root.activeElement);
    const chosen = event.key === "Enter" || event.key === " ";
    if (here === null || (event.altKey && !chosen)) return;
    prose.at = here;
    const index = chosen ? here : prose.step(event.key);
    if (index < 0) return;
    event.preventDefault();
    prose.stand(index).focus({ preventScroll: true });
    prose.reveal(index);
    if (chosen || !(event.ctrlKey || event.metaKey)) takeWith(index, event, chosen);
  });
}

/**
 * The words about a token under the pointer: the weight of its pair, and its spelling.
 *
 * @param {Page} page
 * @param {Listing} listing
 * @param {TextPane} pane
 * @param {number} index
 */
function spokenOf(page, listing, pane, index) {
  const { head, names } = page.now;
  const { i, j } = pane.previewed(listing, index);
  const original = listing.prose.originals[index];
  const spelled = original === undefined ? "" : `spelled “${visible(original)}”`;
  if (i === null || j === null) return spelled;
  const weight = mayLook(head, i, j) ? percent(weightOf(head, i, j)) : "masked";
  return `${pairName(names, i, j)} ${weight}${spelled && `, ${spelled}`}`;
}
