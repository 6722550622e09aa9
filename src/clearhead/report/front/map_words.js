// ---- What is said about the map in words: beside it, under it, and to screen readers.

import { evenness, receivedRatios } from "./marks.js";
import { headName } from "./names.js";
import { placeInRow } from "./tiles.js";
import { countsOf, mayLook, weightOf } from "./weights.js";
import { LONG } from "./why.js";
import { nameOf, pairName, percent, plural, times } from "./words.js";

/** How far the weights of the page are from the model's: what was measured when it was written, of many pairs. */
export const measuredError = ({ error }) => (error === null ? "" : `, within about ${error.toExponential(1)} of the model's`);

/** What the cells show, and where one can go from here. */
export function describeMap(pane) {
  const { layout, page } = pane;
  const { down, across } = layout;
  const { head, layer } = page.shown;
  const { view } = page;
  page.find("map-title").textContent = `The weights of ${headName(page, view)}`;
  const pairs = `${down.per} × ${across.per} pairs`;
  const mean = view.pool === "mean";
  page.find("map-note").textContent = (layout.single
    ? `Each cell is the weight of one pair${measuredError(layer)}. `
    : `Each cell shows the ${mean ? "mean weight" : "largest weight"} of ${pairs}. `) +
    "Bars above: what each key receives, up where that is more than of uniform attention; a cap: cut at 16 × or 1/8 ×. " +
    (head.entropy ? "Bars at the right: the entropy of each query; to the line: uniform." : "");
  page.find("map-pool").hidden = layout.single;
  for (const input of page.root.querySelectorAll("[name=pool]")) input.checked = (input.value === "mean") === mean;
  page.find("zoom-in").disabled = layout.closest;
  page.find("zoom-out").disabled = layout.whole;
  page.find("zoom-whole").disabled = layout.whole;
  pane.canvas.classList.toggle("zoomed", !layout.whole);
}

/** What is in sight, for screen readers. */
export function announceMap(pane) {
  const { down, across, whole } = pane.layout;
  const { head } = pane.page.shown;
  const sizes = `${plural(head.queries, "query")} on ${plural(head.keys, "key")}`;
  const part = whole ? "" : `, of which queries ${down.seen[0]} to ${down.seen[1] - 1} and ` +
    `keys ${across.seen[0]} to ${across.seen[1] - 1} are in sight`;
  pane.canvas.setAttribute("aria-label",
    `weights of ${sizes}${part}: arrow keys move over the pairs, plus and minus zoom, 0 shows all`);
}

/** Says under the map what is known of the pair that is meant. */
export async function sayPair(pane) {
  const { shown } = pane.page;
  const { head, names } = shown;
  const { i, j } = pane.meant;
  const line = pane.page.find("map-pair");
  const turn = pane.turn = {};
  if (i === null || j === null) {
    const even = i === null ? null : evenness(head)?.[i];
    line.textContent = j !== null
      ? `“${nameOf(names[1], j)}” receives ${times(receivedRatios(head)[j])} ` +
        (head.expected ? "what uniform attention would give it" : "what keys receive on average")
      : i === null ? "" : `“${nameOf(names[0], i)}” looks at ${plural(countsOf(head)[i], "key")}` +
        (even === undefined || even === null || even !== even ? "" : `; its entropy is ${percent(even)} of the most it could be`);
    return;
  }
  const pair = pairName(names, i, j);
  if (!mayLook(head, i, j)) {
    line.textContent = `${pair} masked: may not look`;
    return;
  }
  const count = countsOf(head)[i];
  const weight = weightOf(head, i, j);
  const show = (place) => {
    line.textContent = `${pair} ${percent(weight)}, ${place}${times(weight * count)} uniform`;
  };
  if (head.keys > LONG) show("");
  const found = head.keys > LONG ? await pane.picture.helper.ask(head, "place", { i, j }).answer : placeInRow(head, i, j);
  if (turn === pane.turn && found) show(`rank ${found[1]} of ${found[2]}, `);
}
