// ---- The head of the page: the shown layer and head, and the choices that hold for all panes.

import { everyIn, make } from "../../base/front/dom.js";
import { headName } from "./names.js";
import { sinkShareOf } from "./weights.js";
import { percent } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Afar, Layer, Shown, Sketch } from "./types.d.ts"
 */

export class HeaderPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    /** @type {Layer | null} whose heads can be chosen */
    this.of = null;
    this.layer = page.find("layer", HTMLSelectElement);
    this.head = page.find("head", HTMLSelectElement);
    this.layer.append(...page.labels.map((label, at) => new Option(label, String(at))));
    this.layer.addEventListener("change", () => page.choose({ layer: Number(this.layer.value) }));
    this.head.addEventListener("change", () => page.choose({ head: Number(this.head.value) }));
    this.inputs = everyIn(page.root, "header fieldset.choice input", HTMLInputElement);
    for (const input of this.inputs) {
      input.addEventListener("change", () => page.choose({ [input.name]: input.value }));
    }
  }

  /** @param {Sketch} shown */
  sketch(shown) {
    this.paint(shown);
  }

  /** @param {Shown | Sketch} given */
  paint({ layer, head }) {
    const { view } = this.page;
    for (const input of this.inputs) input.checked = [view.scale, view.view].includes(input.value);
    if (this.of !== layer) this.head.replaceChildren(...layer.heads.map(({ number }, at) => new Option(`H${number ?? at}`, String(at))));
    this.of = layer;
    this.layer.value = String(view.layer);
    this.head.value = String(view.head);
    const words = `${headName(this.page, view)} · ${layer.name} · ${layer.kind} attention${shareOfSink(head)}`;
    // a module's name may be broken behind its dots
    this.page.find("where").replaceChildren(...words.split(/(?<=\.)(?=\S)/).flatMap((part) => [part, make("wbr")]));
  }
}

/**
 * The mean share that a head gives its sink, over the queries that see something.
 *
 * @param {Afar} head
 */
function shareOfSink(head) {
  const { logsumexp } = head;
  if (!logsumexp) return "";
  const seeing = head.sink === null ? [] : Array.from(head.counts.keys()).filter((i) => head.counts[i] > 0);
  if (seeing.length === 0) return "";
  const mean = seeing.reduce((sum, i) => sum + sinkShareOf({ sink: head.sink, logsumexp }, i), 0) / seeing.length;
  return ` · ${percent(mean)} of its weight goes to no key: the share of the sink in the softmax, a mean over its queries`;
}
