// ---- The words about the map: beside it, under it, and for screen readers.

import { everyIn } from "../../base/front/dom.js";
import { evenness, receivedRatios } from "./marks.js";
import { isWeights, titleOfMap } from "./meaning_words.js";
import { countsOf, mayLook } from "./weights.js";
import { nameOf, pairName, percent, placeWords, plural, times } from "./words.js";

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
    ? `Each cell is the ${weights ? "weight" : "number"} of one pair${weights ? measuredError(layer) : ""}. `
    : `Each cell shows the ${mean ? "mean" : "largest"} ${weights ? "weight" : "number"} of ${pairs}. `) +
    "Bars above: the weight that each key receives from all queries, over its weight under uniform attention: up where it is " +
    "more, down where it is less; a dark end: cut at 16 × or 1/8 ×. " +
    (head.entropy ? "Bars at the right: the entropy of each query; the line is the largest, of uniform attention." : "");
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
export function sayPair(pane) {
  const shown = pane.page.drawn;
  const { head, names } = shown;
  const { i, j } = pane.meant;
  const line = pane.page.find("map-pair");
  if (i === null || j === null) {
    const even = i === null ? null : evenness(head)?.[i];
    line.textContent = j !== null
      ? `“${nameOf(names[1], j)}” receives, from all queries, ${times(receivedRatios(head)[j])} ` +
        (head.expected ? "its weight under uniform attention" : "the mean weight of a key")
      : i === null ? "" : `“${nameOf(names[0], i)}” sees ${plural(countsOf(head)[i], "key")}` +
        (even === undefined || even === null || even !== even ? "" : `; its entropy is ${percent(even)} of the largest possible`);
    return;
  }
  if (!shown.look) return;
  const { look, pair } = pane.page.current;
  const weight = pair === null || !mayLook(look.head, i, j) ? "" : ` ${percent(look.weights[pair])}`;
  line.textContent = `${pairName(names, i, j)}${weight}, ${pair === null ? "" : placeWords(look, pair, names)}`;
}
