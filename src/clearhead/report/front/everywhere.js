// ---- The same pair in all heads that read the same texts: one square a head, computed when asked for.

import { Scale } from "./colour.js";
import { headName } from "./names.js";
import { countsOf, weightOf } from "./weights.js";
import { make, nameOf, percent } from "./words.js";

export class EverywherePane {
  constructor(page) {
    this.page = page;
    this.box = page.find("everywhere");
    this.box.addEventListener("toggle", () => this.paint(page.shown));
    this.turn = 0;
  }

  async paint(shown) {
    this.box.hidden = shown === null || shown.pair === null;
    if (!this.box.open || this.box.hidden) return;
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
        const head = await page.run.open(at, number);
        if (turn !== this.turn) return;
        const weight = weightOf(head, i, j);
        found.push({ at, number, weight });
        row.append(this.cell(head, i, weight, at, number));
      }
      rows.push(row);
    }
    const focused = grid.contains(page.root.activeElement);
    grid.replaceChildren(...rows);
    if (focused) grid.querySelector("[aria-current]")?.focus();
    const most = found.reduce((best, one) => (one.weight > best.weight ? one : best));
    page.find("everywhere-note").textContent =
      `Each square is “${nameOf(names[0], i)}” → “${nameOf(names[1], j)}” in one head, in the colours of the map. ` +
      `Most in ${headName(page, { layer: most.at, head: most.number })}: ${percent(most.weight)}.`;
  }

  cell(head, i, weight, at, number) {
    const { page } = this;
    const { kind } = page.shown.scale;
    const scale = new Scale(kind, (countsOf(head), head.mostKeys), page.theme.dark);
    const step = scale.step(scale.value(weight, countsOf(head)[i]));
    const button = make("button", "square");
    button.style.backgroundColor = scale.css(step);
    const words = `${headName(page, { layer: at, head: number })}: ${percent(weight)}`;
    button.title = words;
    button.setAttribute("aria-label", words);
    const { view } = page;
    if (view.layer === at && view.head === number) button.setAttribute("aria-current", "true");
    const [token, pair] = page.shown.view === "out" ? [i, page.shown.j] : [page.shown.j, i];
    button.addEventListener("click", () => page.choose({ layer: at, head: number, token, pair }));
    return button;
  }
}
