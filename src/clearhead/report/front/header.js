// ---- The head of the page: what is opened, and the choices that hold for all panes.

import { headName } from "./names.js";
import { sinkShareOf } from "./weights.js";
import { percent } from "./words.js";

export class HeaderPane {
  constructor(page) {
    this.page = page;
    this.inputs = page.root.querySelectorAll("fieldset.choice input");
    for (const input of this.inputs) {
      input.addEventListener("change", () => page.choose({ [input.name]: input.value }));
    }
  }

  sketch(shown) {
    this.paint(shown);
  }

  paint({ layer, head }) {
    const { view } = this.page;
    for (const input of this.inputs) input.checked = view[input.name] === input.value;
    this.page.find("where").textContent =
      `${headName(this.page, view)} · ${layer.name} · ${layer.kind} attention${shareOfSink(head)}`;
  }
}

/** What a head gives its sink, over the queries that see something. */
function shareOfSink(head) {
  const seeing = head.sink === null ? [] : Array.from(head.counts.keys()).filter((i) => head.counts[i] > 0);
  if (seeing.length === 0) return "";
  const mean = seeing.reduce((sum, i) => sum + sinkShareOf(head, i), 0) / seeing.length;
  return ` · ${percent(mean)} of its weight goes to no key (a sink in the softmax), the mean of its queries`;
}
