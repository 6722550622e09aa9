// ---- Theme, size for a talk, saved files, print, and the list of keys.

import { closestTo, firstIn, make, onKey, withModifier } from "../../base/front/dom.js";
import { headName } from "./names.js";
import { captionOf, csvOfRow, save, svgOfMap, svgOfText, written } from "./saved.js";
import { SCALES } from "./view.js";

/** @import { Page } from "./mount.js" */

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
  ["?", "this list"],
];

export class ToolsPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    const { root } = page;
    this.help = page.find("help", HTMLDialogElement);
    this.menu = page.find("save", HTMLDetailsElement);
    const table = page.find("key-list");
    for (const [key, does] of KEYS) table.append(make("dt", "", key), make("dd", "", does));
    /** @type {Record<string, () => void>} */
    this.does = {
      t: () => this.turnTheme(),
      l: () => this.enlarge(),
      s: () => page.choose({ scale: SCALES[(SCALES.indexOf(page.view.scale) + 1) % SCALES.length] }),
      x: () => page.choose({ view: page.view.view === "out" ? "in" : "out" }),
      "?": () => {
        this.help.showModal();
        page.find("help-title").focus(); // else the button at the end has the focus, and the list is scrolled to it
      },
    };
    page.find("theme").addEventListener("click", this.does.t);
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
