// ---- The meaning of the colours.

import { make, penOf } from "../../base/front/dom.js";
import { lastOf } from "../../base/front/numbers.js";
import { hatching } from "./colour.js";
import { drawRamp } from "./signed.js";
import { countsOf } from "./weights.js";
import { nameOf, percent } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Shown, Sketch } from "./types.d.ts"
 */

/**
 * @param {Page} page
 * @param {Shown | Sketch} given
 */
export function paintLegend(page, { head, i, scale, names }) {
  drawRamp(page.find("ramp", HTMLCanvasElement), scale.table);
  const hatch = penOf(page.find("hatch", HTMLCanvasElement));
  hatch.fillStyle = hatching(hatch, page.theme.colours, 1);
  hatch.fillRect(0, 0, 28, 14);

  const box = page.find("legend-ticks");
  box.replaceChildren();
  /**
   * @param {number} value
   * @param {string} text
   * @param {string} className
   */
  const put = (value, text, className) => {
    const mark = make("span", className, text);
    box.append(mark);
    const share = scale.step(value) / 255;
    mark.style.left = `${100 * share}%`;
    mark.classList.toggle("at-end", share > 0.85);
    mark.classList.toggle("at-start", share < 0.15);
    return mark;
  };
  const { ticks } = scale;
  /** @type {{ left: number, right: number }[]} */
  const taken = [];
  for (const mark of [lastOf(ticks), ...ticks.slice(0, -1)].map(([value, words]) => put(value, words, "tick"))) {
    const { left, right } = mark.getBoundingClientRect();
    if (taken.some((other) => left < other.right + 4 && other.left < right + 4)) mark.remove();
    else taken.push({ left, right });
  }
  const counts = countsOf(head);
  page.find("legend-mask").hidden = counts.every((count) => count === head.keys);
  const known = i !== null && counts[i] > 0;
  page.find("legend-equal").hidden = !known;
  if (i === null || !known) return;
  const whose = head.alike ? "" : ` of “${nameOf(names[0], i)}”`;
  put(scale.value(1 / counts[i], counts[i]), "", "equal");
  page.find("legend-equal").textContent =
    `Mark: uniform attention, an equal share of 1/${counts[i]} = ${percent(1 / counts[i])} for each key${whose}`;
}
