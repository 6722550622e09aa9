// ---- Moving the map, and choosing a pair on it.

import { ARROWS, everyIn } from "../../base/front/dom.js";
import { strongestIn } from "./layout.js";
import { describeMap } from "./map_words.js";
import { pairOf } from "./view.js";
import { Gestures } from "./zoom.js";

/**
 * @import { Axis } from "./layout.js"
 * @import { MapPane } from "./map.js"
 * @import { Pair, Point } from "./types.d.ts"
 */

/**
 * The strongest pair under a point, or a whole token beside the picture.
 *
 * @param {MapPane} pane
 * @param {Point} given
 * @returns {Pair | null}
 */
function pairAt(pane, [x, y]) {
  const { made: layout, page: { shown } } = pane;
  if (!layout || !shown?.look) return null;
  const at = layout.pointAt(x, y);
  if (at.i === null || at.j === null) return at.i === null && at.j === null ? null : at;
  if (layout.single) return at;
  const { i, j } = strongestIn(shown.head, { i: at.i, j: at.j }, layout.down.per, layout.across.per);
  return { i, j };
}

/**
 * Shows the map at another of its scales. The pair under a point stays there; without a point the current pair, else the middle.
 *
 * @param {MapPane} pane
 * @param {number} to
 * @param {Point} [point]
 */
function zoomMap(pane, to, point) {
  const { layout } = pane;
  const { ratio } = layout;
  const { i, j } = pane.page.drawn;
  /**
   * @param {Axis} axis
   * @param {number | null} index
   */
  const middle = (axis, index) => {
    const start = index === null ? -1 : axis.startOf(index) + axis.cell / 2;
    return start >= 0 && start < axis.room ? start : axis.room / 2;
  };
  const at = point ? [point[0] * ratio - layout.left, point[1] * ratio - layout.top]
    : [middle(layout.across, j), middle(layout.down, i)];
  layout.scaleTo(to, at[0], at[1]);
  describeMap(pane);
  pane.changed();
}

/**
 * Listens to gestures, keys and buttons that move the map and its pair.
 *
 * @param {MapPane} pane
 */
export function steer(pane) {
  const { canvas, page } = pane;
  /**
   * @param {number} factor
   * @param {Point} [point]
   */
  const zoomTo = (factor, point) => zoomMap(pane, pane.layout.times(factor), point);
  const whole = () => {
    pane.layout.show(null);
    describeMap(pane);
    pane.changed();
  };
  new Gestures(canvas, {
    zoom: (step, point) => {
      const { lead } = pane.layout;
      zoomMap(pane, Math.min(lead.scales.length - 1, Math.max(0, lead.at + step)), point);
    },
    zoomTo,
    scale: () => pane.layout.lead.pixels,
    scaleTo: (pixels, point) => zoomMap(pane, pane.layout.lead.nearest(pixels), point),
    free: (way) => !(way > 0 ? pane.layout.closest : pane.layout.whole),
    drag: (x, y) => {
      const { across, down, ratio } = pane.layout;
      across.moveTo(across.offset - x * ratio);
      down.moveTo(down.offset - y * ratio);
      pane.changed();
    },
    point: (point) => {
      pane.closed = false;
      page.hover(point && pairAt(pane, point));
    },
    choose: (point) => {
      const found = pairAt(pane, point);
      pane.closed = false;
      if (found && found.i !== null && found.j !== null) page.choose(pairOf(page.view.view, found.i, found.j));
    },
  });
  page.find("zoom-in").addEventListener("click", () => zoomTo(2));
  page.find("zoom-out").addEventListener("click", () => zoomTo(0.5));
  page.find("zoom-whole").addEventListener("click", whole);
  for (const input of everyIn(page.root, "[name=pool]", HTMLInputElement)) {
    input.addEventListener("change", () => page.choose({ pool: input.value === "mean" ? "mean" : null }, false));
  }
  for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => page.shown && pane.scheduleMarks());
  canvas.addEventListener("keydown", (event) => {
    if (!page.shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const { head, i, j } = page.drawn;
    const { down, across } = pane.layout;
    /** @type {Record<string, () => void>} */
    const others = {
      "+": () => zoomTo(2), "=": () => zoomTo(2), "-": () => zoomTo(0.5), 0: whole,
      Escape: () => { pane.closed = true; pane.scheduleMarks(); },
    };
    const step = ARROWS[event.key];
    if (!step && !others[event.key]) return;
    event.preventDefault();
    if (!step) return void others[event.key]();
    pane.closed = false;
    /**
     * @param {number} value
     * @param {number} count
     */
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
    page.choose(pairOf(page.view.view,
      clamp((i ?? 0) + step[0] * down.per, head.queries),
      clamp((j ?? 0) + step[1] * across.per, head.keys)), false);
  });
}
