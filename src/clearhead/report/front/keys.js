// ---- Arrow keys among elements that are laid out in lines.

/**
 * The index that an arrow key leads to among laid-out elements, or -1.
 *
 * @param {string} key
 * @param {number} from
 * @param {HTMLElement[]} elements
 */
export function stepTo(key, from, elements) {
  const last = elements.length - 1;
  const forward = getComputedStyle(elements[from].parentElement ?? elements[from]).direction === "rtl" ? -1 : 1;
  if (key === "ArrowRight") return Math.min(last, Math.max(0, from + forward));
  if (key === "ArrowLeft") return Math.min(last, Math.max(0, from - forward));
  if (key === "Home") return 0;
  if (key === "End") return last;
  if (key !== "ArrowUp" && key !== "ArrowDown") return -1;
  const way = key === "ArrowDown" ? 1 : -1;
  const here = elements[from].getBoundingClientRect();
  /** @param {DOMRect} box */
  const aside = (box) => Math.abs(box.left + box.width / 2 - here.left - here.width / 2);
  let best = from;
  let least = Infinity;
  let row = null;
  for (let at = from + way; at >= 0 && at <= last; at += way) {
    const box = elements[at].getBoundingClientRect();
    if ((box.top - here.top) * way < 4) continue; // still the same row
    if (row !== null && Math.abs(box.top - row) > 4) break; // past the next row
    row = box.top;
    if (aside(box) < least) {
      least = aside(box);
      best = at;
    }
  }
  return best;
}
