// ---- The same pair in all heads that read the same texts: one square for each head, computed when it is asked for.

import { everyIn, make } from "../../base/front/dom.js";
import { Scale } from "./colour.js";
import { openUnder } from "./meanings.js";
import { headName } from "./names.js";
import { countsOf, mostKeysOf, weightOf } from "./weights.js";
import { nameOf, percent } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Head, HeadAt, Shown, Sketch } from "./types.d.ts"
 */

export class EverywherePane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.box = page.find("everywhere", HTMLDetailsElement);
    this.box.addEventListener("toggle", () => this.paint(page.shown));
    this.turn = 0;
  }

  /** @param {Shown} shown */
  linger(shown) {
    this.paint(shown);
  }

  /** @param {Shown | Sketch | null} shown */
  async paint(shown) {
    this.box.hidden = shown === null || shown.pair === null;
    if (!shown?.look || shown.i === null || shown.j === null || !this.box.open) return;
    const turn = ++this.turn;
    const { page } = this;
    const { i, j, layer: own, names } = shown;
    const { layers } = page.run;
    const grid = page.find("everywhere-grid");
    const rows = [];
    const found = [];
    for (const [at, layer] of layers.entries()) {
      if (layer.queryText !== own.queryText || layer.keyText !== own.keyText || layer.kind !== own.kind) continue;
      const row = make("div", "row");
      row.append(make("span", "number", page.labels[at]));
      for (let number = 0; number < layer.heads.length; number++) {
        const head = await openUnder(page.run, { layer: at, head: number }, page.view.meaning);
        if (turn !== this.turn) return;
        const weight = weightOf(head, i, j);
        found.push({ at, number, weight });
        row.append(this.cell(head, shown, weight, { layer: at, head: number }));
      }
      rows.push(row);
    }
    const focused = grid.contains(page.root.activeElement);
    grid.replaceChildren(...rows);
    if (focused) everyIn(grid, "[aria-current]", HTMLElement)[0]?.focus();
    const most = found.reduce((best, one) => (one.weight > best.weight ? one : best));
    page.find("everywhere-note").textContent =
      `Each square is a head: its weight of “${nameOf(names[0], i)}” → “${nameOf(names[1], j)}”, in the colours of the map. ` +
      `Largest: ${percent(most.weight)}, ${headName(page, { layer: most.at, head: most.number })}.`;
  }

  /**
   * @param {Head} head
   * @param {Shown} shown
   * @param {number} weight
   * @param {HeadAt} place
   */
  cell(head, { i, look, pair }, weight, place) {
    const { page } = this;
    const { kind } = page.now.scale;
    const scale = new Scale(kind, mostKeysOf(head), page.theme.dark);
    const step = scale.step(scale.value(weight, countsOf(head)[i ?? 0]));
    const button = make("button", "square");
    button.style.backgroundColor = scale.css(step);
    const words = `${headName(page, place)}: ${percent(weight)}`;
    button.title = words;
    button.setAttribute("aria-label", words);
    const { view } = page;
    if (view.layer === place.layer && view.head === place.head) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => page.choose({ ...place, view: look.view, token: look.token, pair }));
    return button;
  }
}
