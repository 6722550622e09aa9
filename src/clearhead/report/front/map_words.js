// ---- The words about the map: beside it, under it, and for screen readers.

import { everyIn } from "../../base/front/dom.js";
import { evenness, receivedRatios } from "./marks.js";
import { isWeights, titleOfMap } from "./meaning_words.js";
import { placeInRow } from "./tiles.js";
import { countsOf, mayLook, weightOf } from "./weights.js";
import { LONG } from "./why.js";
import { nameOf, pairName, percent, plural, times } from "./words.js";

/**
 * @import { MapPane } from "./map.js"
 * @import { Layer } from "./types.d.ts"
 */

/**
 * The difference of the page's weights from the model's, which was measured for many pairs when the page was written.
 *
 * @param {Layer} given
 */
export const measuredError = ({ error }) => (error === null ? "" : `, within about ${error.toExponential(1)} of the model's`);

/**
 * The meaning of the cells, and the possible next steps.
 *
 * @param {MapPane} pane
 */
export function describeMap(pane) {
  const { layout, page } = pane;
  const { down, across } = layout;
  const { head, layer, meaning } = page.drawn;
  const { view } = page;
  const weights = isWeights(meaning);
  page.find("map-title").textContent = titleOfMap(page, meaning);
  const pairs = `${down.per} × ${across.per} pairs`;
  const mean = view.pool === "mean";
  page.find("map-note").textContent = (layout.single
    ? `Each cell is the ${weights ? "weight" : "number"} of one pair${measuredError(layer)}. `
    : `Each cell shows the ${mean ? "mean" : "largest"} ${weights ? "weight" : "number"} of ${pairs}. `) +
    "Bars above: what each key receives, up where that is more than of uniform attention; a cap: cut at 16 × or 1/8 ×. " +
    (head.entropy ? "Bars at the right: the entropy of each query; to the line: uniform." : "");
  page.find("map-pool").hidden = layout.single;
  for (const input of everyIn(page.root, "[name=pool]", HTMLInputElement)) input.checked = (input.value === "mean") === mean;
  page.find("zoom-in", HTMLButtonElement).disabled = layout.closest;
  page.find("zoom-out", HTMLButtonElement).disabled = layout.whole;
  page.find("zoom-whole", HTMLButtonElement).disabled = layout.whole;
  pane.canvas.classList.toggle("zoomed", !layout.whole);
}

/**
 * The part in sight, for screen readers.
 *
 * @param {MapPane} pane
 */
export function announceMap(pane) {
  const { down, across, whole } = pane.layout;
  const { head } = pane.page.drawn;
  const sizes = `${plural(head.queries, "query")} on ${plural(head.keys, "key")}`;
  const part = whole ? "" : `, of which queries ${down.seen[0]} to ${down.seen[1] - 1} and ` +
    `keys ${across.seen[0]} to ${across.seen[1] - 1} are in sight`;
  pane.canvas.setAttribute("aria-label",
    `weights of ${sizes}${part}: arrow keys move over the pairs, plus and minus zoom, 0 shows all`);
}

/**
 * Shows the words about the current pair under the map.
 *
 * @param {MapPane} pane
 */
export async function sayPair(pane) {
  const shown = pane.page.drawn;
  const { head, names } = shown;
  const { i, j } = pane.meant;
  const line = pane.page.find("map-pair");
  const turn = ++pane.said;
  if (i === null || j === null) {
    const even = i === null ? null : evenness(head)?.[i];
    line.textContent = j !== null
      ? `“${nameOf(names[1], j)}” receives ${times(receivedRatios(head)[j])} ` +
        (head.expected ? "what uniform attention would give it" : "what keys receive on average")
      : i === null ? "" : `“${nameOf(names[0], i)}” looks at ${plural(countsOf(head)[i], "key")}` +
        (even === undefined || even === null || even !== even ? "" : `; its entropy is ${percent(even)} of the most it could be`);
    return;
  }
  if (!shown.look) return;
  const { head: read } = shown;
  const pair = pairName(names, i, j);
  if (!mayLook(read, i, j)) {
    line.textContent = `${pair} masked: may not look`;
    return;
  }
  const count = countsOf(read)[i];
  const weight = weightOf(read, i, j);
  /** @param {string} place */
  const show = (place) => {
    line.textContent = `${pair} ${percent(weight)}, ${place}${times(weight * count)} uniform`;
  };
  if (read.keys > LONG) show("");
  const found = read.keys > LONG ? await pane.helper.ask(read, { job: "place", request: { i, j } }).answer : placeInRow(read, i, j);
  if (turn === pane.said && found) show(`rank ${found[1]} of ${found[2]}, `);
}
