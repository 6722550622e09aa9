// ---- The choice of the number that is shown of a pair, and its sentence.

import { meaningIn, MEANINGS } from "./meanings.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Readers, Shown, Sketch } from "./types.d.ts"
 */

/** @satisfies {Readers} what this pane reads of the address */
export const ADDRESS_OF_MEANING = { meaning: meaningIn };

export class MeaningPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.choice = page.find("meaning", HTMLSelectElement);
    this.choice.append(...MEANINGS.map(({ name, title }) => new Option(title, name)));
    this.choice.addEventListener("change", () => {
      const { value } = this.choice;
      page.find("meaning-says").textContent = "computing …";
      page.choose({ meaning: value === MEANINGS[0].name ? null : value });
    });
  }

  /** @param {Sketch} shown */
  sketch(shown) {
    this.paint(shown);
  }

  /** @param {Shown | Sketch} given */
  paint({ meaning }) {
    const { run, view } = this.page;
    for (const [at, { title, lacks }] of MEANINGS.entries()) {
      const option = this.choice.options[at];
      const missing = lacks(run, view);
      option.disabled = missing !== "";
      option.textContent = missing ? `${title}: ${missing}` : title;
    }
    this.choice.value = meaning.name;
    this.page.find("meaning-says").textContent = meaning.says;
  }
}
