// ---- What the colours mean.

import { hatching } from "./colour.js";
import { drawRamp } from "./signed.js";
import { countsOf } from "./weights.js";
import { make, nameOf, percent } from "./words.js";

export function paintLegend(page, { head, i, scale, names }) {
  const byId = (id) => page.find(id);
  drawRamp(byId("ramp"), scale.table);
  const hatch = byId("hatch").getContext("2d");
  hatch.fillStyle = hatching(hatch, page.theme.colours, 1);
  hatch.fillRect(0, 0, 28, 14);

  const box = byId("legend-ticks");
  box.replaceChildren();
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
  const taken = [];
  for (const mark of [ticks.at(-1), ...ticks.slice(0, -1)].map(([value, words]) => put(value, words, "tick"))) {
    const { left, right } = mark.getBoundingClientRect();
    if (taken.some((other) => left < other.right + 4 && other.left < right + 4)) mark.remove();
    else taken.push({ left, right });
  }
  const counts = countsOf(head);
  byId("legend-mask").hidden = counts.every((count) => count === head.keys);
  const known = i !== null && counts[i] > 0;
  byId("legend-equal").hidden = !known;
  if (!known) return;
  const whose = head.alike ? "" : ` of “${nameOf(names[0], i)}”`;
  put(scale.value(1 / counts[i], counts[i]), "", "equal");
  byId("legend-equal").textContent =
    `mark: uniform share${whose}, 1/${counts[i]} = ${percent(1 / counts[i])}`;
}
