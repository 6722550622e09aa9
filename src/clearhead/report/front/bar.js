// ---- Bars.

import { make } from "../../base/front/dom.js";

/**
 * A bar that is filled to a percentage of its width.
 *
 * @param {number} share
 * @param {string} [className]
 */
export function barOf(share, className) {
  const bar = make("span", "bar");
  const filled = make("span", className);
  bar.append(filled);
  filled.style.width = `${share}%`;
  return bar;
}

/**
 * A bar from the middle: to the right above 0, to the left below. `share`: −1 to 1.
 *
 * @param {number} share
 */
export function signedBarOf(share) {
  const bar = barOf(50 * Math.min(1, Math.abs(share)), share < 0 ? "less" : "");
  bar.classList.add("signed");
  return bar;
}
