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
