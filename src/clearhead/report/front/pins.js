// ---- Heads that are pinned, and the two that are compared.

import { everyIn, make } from "../../base/front/dom.js";
import { sideName } from "./compare.js";
import { keyOf, placesIn } from "./measures.js";
import { counterpartOf, headName } from "./names.js";

/**
 * @import { HeadsPane } from "./heads.js"
 * @import { HeadAt } from "./types.d.ts"
 */

const SIDES = /** @type {const} */ (["a", "b"]);

export class HeadPins {
  /** @param {HeadsPane} pane */
  constructor(pane) {
    this.pane = pane;
    const { page } = pane;
    page.find("pin").addEventListener("click", () => this.toggle(page.view));
    page.find("counterpart").addEventListener("click", () => this.beside && page.choose(this.beside));
    for (const side of SIDES) {
      const choice = page.find(`side-${side}`, HTMLSelectElement);
      choice.addEventListener("change", () => page.choose({ [side]: choice.value || null }));
    }
  }

  /** The change that compares the chosen head with the same head of the other recording; null where there is none. */
  get beside() {
    const { run, view } = this.pane.page;
    const layer = counterpartOf(run, view.layer);
    return layer === null ? null : { a: keyOf(view), b: keyOf({ layer, head: view.head }) };
  }

  /** @param {HeadAt} place */
  toggle(place) {
    const pins = new Set(this.pane.pinned);
    if (!pins.delete(keyOf(place))) pins.add(keyOf(place));
    this.pane.page.choose({ pins: [...pins].join("_") || null });
  }

  paint() {
    const { page, pinned } = this.pane;
    const { view } = page;
    const here = { layer: view.layer, head: view.head };
    page.find("pin").textContent = `${pinned.has(keyOf(here)) ? "Unpin" : "Pin"} ${headName(page, here)}`;
    const held = placesIn(view.pins, page.run);
    const hadFocus = page.find("pins").contains(page.root.activeElement);
    page.find("pins").replaceChildren(...held.map((place) => {
      const chip = make("span", "chip pin");
      const open = make("button", "", headName(page, place));
      const drop = make("button", "", "×");
      open.setAttribute("aria-current", String(keyOf(place) === keyOf(here)));
      drop.setAttribute("aria-label", `unpin ${headName(page, place)}`);
      open.addEventListener("click", () => this.pane.open(place));
      drop.addEventListener("click", () => this.toggle(place));
      chip.append(open, drop);
      return chip;
    }));
    if (hadFocus) (everyIn(page.find("pins"), "button", HTMLElement)[0] ?? page.find("pin")).focus();
    const button = page.find("counterpart");
    const { beside } = this;
    button.hidden = beside === null;
    if (beside) button.textContent = `Compare ${headName(page, here)} with ${sideName(page, beside.b)}`;
    for (const side of SIDES) {
      const choices = new Map([["", "–"], [keyOf(here), headName(page, here)]]);
      for (const place of held) choices.set(keyOf(place), headName(page, place));
      if (held.length > 1) choices.set("pins", sideName(page, "pins"));
      choices.set("uniform", sideName(page, "uniform"));
      const chosen = view[side];
      if (chosen !== null) choices.set(chosen, sideName(page, chosen));
      page.find(`side-${side}`).replaceChildren(...[...choices].map(([value, words]) => new Option(words, value)));
      page.find(`side-${side}`, HTMLSelectElement).value = chosen ?? "";
    }
  }
}
