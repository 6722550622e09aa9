// ---- More or less of the page, theme, size for a talk, saved files, print, and the list of words and keys.

import { closestTo, firstIn, make, onKey, withModifier } from "../../base/front/dom.js";
import { headName } from "./names.js";
import { captionOf, csvOfRow, save, svgOfMap, svgOfText, written } from "./saved.js";
import { isSimple } from "./simple.js";
import { SCALES } from "./view.js";

/** @import { Page } from "./mount.js" */

const TERMS = [
  ["token", "The model reads the text as tokens: words, parts of words and marks of its own."],
  ["layer", "The model passes the text through its layers in turn, L0 first."],
  ["head", "Each head of a layer looks at the text in a way of its own; L0H2 is head 2 of layer 0."],
  ["query, key", "The query is the token that looks, and a key is a token that it may look at."],
  ["weight", "The weight of a key is the share of the query's attention that it gets."],
  ["uniform attention", "Uniform attention gives every key that the query may see the same weight."],
  ["× uniform", "At 2 × uniform a key gets twice the weight that uniform attention would give it."],
  ["log, linear", "The colours follow the logarithm of the weight, or the weight itself."],
  ["masked", "The query may not see a masked key."],
  ["entropy", "Entropy says how widely a query spreads its attention: 0 nats on one key alone, and most for uniform attention."],
  ["effective keys", "So many keys, looked at equally, would have the same entropy."],
  ["distance", "The distance is the number of positions between a query and its keys, a mean by weight."],
  ["received", "A key receives the sum of the weights that all queries give it."],
  ["sink", "A sink takes much weight from most queries: often the first token, or a number in the softmax that is no token's."],
];

const KEYS = [
  ["arrow keys", "move among heads, tokens or pairs, wherever the focus is"],
  ["Enter", "chooses"],
  ["Alt and click, or Alt and Enter", "in the text: the pair of the chosen token and this one"],
  ["p, a, b", "among the heads: pins one, compares it as the first, as the second"],
  ["/", "finds a word in the text"],
  ["+ − 0", "zoom the map in, out, and to the whole"],
  ["x", "switches between what a token looks at and what looks at it"],
  ["s", "the next colour scale"],
  ["t", "light, dark, or as the system"],
  ["l", "larger, for a talk"],
  ["m", "more: the whole page, or the simple view"],
  ["?", "this list"],
];

export class ToolsPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    const { root } = page;
    this.help = page.find("help", HTMLDialogElement);
    this.menu = page.find("save", HTMLDetailsElement);
    for (const [id, list] of /** @type {const} */ ([["word-list", TERMS], ["key-list", KEYS]])) {
      page.find(id).append(...list.flatMap(([name, says]) => [make("dt", "", name), make("dd", "", says)]));
    }
    /** @type {Record<string, () => void>} */
    this.does = {
      t: () => this.turnTheme(),
      l: () => this.enlarge(),
      m: () => page.choose({ all: isSimple(page.view) ? "1" : "0" }),
      s: () => page.choose({ scale: SCALES[(SCALES.indexOf(page.view.scale) + 1) % SCALES.length] }),
      x: () => page.choose({ view: page.view.view === "out" ? "in" : "out" }),
      "?": () => {
        this.help.showModal();
        page.find("help-title").focus(); // else the button at the end has the focus, and the list is scrolled to it
      },
    };
    page.find("theme").addEventListener("click", this.does.t);
    page.find("all").addEventListener("click", this.does.m);
    page.find("present").addEventListener("click", this.does.l);
    page.find("help-button").addEventListener("click", this.does["?"]);
    page.find("print").addEventListener("click", () => window.print());
    this.help.addEventListener("click", (event) => event.target === this.help && this.help.close());
    onKey(root, (event) => this.key(event));
    root.addEventListener("pointerdown", ({ target }) => { this.menu.open &&= target instanceof Node && this.menu.contains(target); });
    this.menu.addEventListener("click", (event) => {
      const what = closestTo(event.target, "[data-save]")?.dataset.save;
      if (what) this.save(what);
    });
    this.menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.menu.open) return;
      this.menu.open = false;
      firstIn(this.menu, "summary", HTMLElement).focus();
    });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const field = closestTo(event.target, "input:not([type=radio]), select, textarea, dialog");
    if (field || withModifier(event) || event.defaultPrevented || !this.page.shown) return;
    const does = this.does[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }

  turnTheme() {
    this.page.theme.turn();
    this.paint();
  }

  enlarge() {
    const { host } = this.page;
    const root = host.ownerDocument.documentElement;
    root.style.fontSize = host.toggleAttribute("data-large") ? "22px" : ""; // all sizes of letters are in rem
    this.paint();
    this.page.refresh();
  }

  paint() {
    const { theme, host } = this.page;
    this.page.find("theme").textContent = theme.dark ? "Light" : "Dark";
    const simple = isSimple(this.page.view);
    this.page.find("all").textContent = simple ? "More" : "Less";
    this.page.find("all").setAttribute("aria-expanded", String(!simple));
    this.page.find("present").setAttribute("aria-pressed", String(host.hasAttribute("data-large")));
  }

  /** @param {string} what */
  async save(what) {
    const { page } = this;
    const name = `${page.run.title} ${headName(page, page.view)}`.replace(/[^\p{L}\p{N} ._-]/gu, "_").slice(0, 80);
    /** @type {Record<string, () => void>} */
    const makes = {
      map: () => save(`${name} map.svg`, written(svgOfMap(page, page.view.zoom?.split(".").map(Number))), "image/svg+xml"),
      text: () => save(`${name} text.svg`, written(svgOfText(page)), "image/svg+xml"),
      row: () => save(`${name} token ${page.view.token}.csv`, csvOfRow(page), "text/csv"),
      caption: () => save(`${name} caption.txt`, `${captionOf(page)}\n`, "text/plain"),
    };
    makes[what]();
    this.menu.open = false;
  }
}
