// ---- The page of a survey: the heads of a model, by statistics over many texts. No call stands behind it.

import { ADDRESS_OF_HEADS, HeadsPane } from "./heads.js";
import { ALONE, RATIOS, titleOf, valueWords } from "./measures.js";
import { headName, labelsOf } from "./names.js";
import { Theme } from "./theme.js";
import { View } from "./view.js";
import { make } from "./words.js";

/** The view of heads alone: an address has no token. */
class SurveyView extends View {
  get address() {
    const parts = new URLSearchParams({ layer: this.layer, head: this.head });
    for (const [name] of this.more) if (this[name] !== null) parts.set(name, this[name]);
    return `#${parts}`;
  }
}

/** What is read of the address: there are no small maps, and no pins. */
const { by, against, only } = ADDRESS_OF_HEADS;
const ADDRESS = { by, against, show: (text) => (["list", "scatter"].includes(text) ? text : null), only };

/** There is no second call to compare a head with. */
class NoPins {
  toggle() {}

  paint() {}
}

/** What the panes of the report read of a recording, of the page's data. */
function runOf(meta) {
  for (const { name, share } of meta.measures) {
    if (!share) RATIOS.add(name);
    if (meta.layers.every(({ heads }) => heads.every(({ measures }) => !measures[number(meta, name)]?.[1]))) ALONE.add(name);
  }
  const named = (values) => Object.fromEntries(values.map((value, place) => [meta.measures[place].name, value])
    .filter(([, value]) => value).map(([name, [value, uniform]]) => [name, [value, uniform ?? 0]]));
  const layers = meta.layers.map((layer) => ({
    ...layer, kind: "self", queries: 1, keys: 1, queryText: 0, keyText: 0,
    heads: layer.heads.map((head) => ({ ...head, measures: named(head.measures) })),
  }));
  const none = { distinctive: null, leftOut: [], beside: [], texts: [] };
  return { title: meta.title, measures: meta.measures, layers, first: { layer: 0, head: 0 }, ...none };
}

const number = (meta, name) => meta.measures.findIndex((measure) => measure.name === name);

class SurveyPage {
  constructor(host, meta, template) {
    this.host = host;
    this.root = host.attachShadow({ mode: "open" });
    this.root.append(template.content.cloneNode(true));
    this.root.querySelector("[value=maps]").parentElement.remove();
    this.run = runOf(meta);
    this.labels = labelsOf(this.run.layers);
    this.view = new SurveyView(this.run, ADDRESS);
    this.theme = new Theme(host, () => this.paint());
    this.find("title").textContent = meta.title;
    this.find("where").textContent = meta.said;
    this.find("theme").addEventListener("click", () => {
      const other = this.theme.system.matches ? "light" : "dark";
      this.theme.choose(this.theme.chosen === null ? other : null);
    });
    this.pane = new HeadsPane(this, NoPins);
    new ResizeObserver(() => this.room !== host.clientWidth && this.paint()).observe(host);
  }

  find(id) {
    return this.root.getElementById(id);
  }

  go(address) {
    this.view.read(address);
    this.paint();
  }

  choose(change) {
    this.view.change(change);
    this.paint();
    try {
      if (this.view.address !== window.location.hash) window.history.replaceState(null, "", this.view.address);
    } catch {
      // A page inside another document may not change its address: it works without.
    }
  }

  paint() {
    if (!this.pane) return;
    this.room = this.host.clientWidth;
    this.find("theme").textContent = this.theme.dark ? "Light" : "Dark";
    this.pane.paint(null);
    const { layer, head } = this.view;
    this.find("one").textContent = `${headName(this, this.view)} · ${this.run.layers[layer].name}`;
    const { measures } = this.run.layers[layer].heads[head];
    this.find("figures").replaceChildren(...this.run.measures.flatMap(({ name }) => {
      const [value, uniform] = measures[name] ?? [null, null];
      const said = value === null ? "–" : valueWords(name, value);
      const beside = value === null || ALONE.has(name) ? "" : ` (uniform ${valueWords(name, uniform)})`;
      return [make("dt", "", titleOf(name)), make("dd", "", said + beside)];
    }));
  }
}

const meta = JSON.parse(document.getElementById("meta").textContent);
const host = document.getElementById("clearhead");
host.hidden = false;
const page = new SurveyPage(host, meta, document.getElementById("clearhead-page"));
window.addEventListener("hashchange", () => window.location.hash !== page.view.address && page.go(window.location.hash));
page.go(window.location.hash);
