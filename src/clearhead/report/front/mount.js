// ---- A report in an element: what is chosen, the panes that show it, and the one way it changes.

import { ADDRESS_OF_TOKENS } from "./chosen.js";
import { Scale } from "./colour.js";
import { ADDRESS_OF_COMPARISON, ComparePane } from "./compare.js";
import { EverywherePane } from "./everywhere.js";
import { HeaderPane } from "./header.js";
import { ADDRESS_OF_HEADS, HeadsPane } from "./heads.js";
import { ADDRESS_OF_LINES, LinesPane } from "./lines.js";
import { ADDRESS_OF_MAP, MapPane } from "./map.js";
import { labelsOf } from "./names.js";
import { PairPane } from "./pair.js";
import { HeadPins } from "./pins.js";
import { ADDRESS_OF_TEXT, TextPane } from "./text.js";
import { Theme } from "./theme.js";
import { ToolsPane } from "./tools.js";
import { View } from "./view.js";
import { countsOf, lookOf } from "./weights.js";
import { readText } from "./words.js";

// Each shows what is chosen, in its own part. The map is first: its worker computes while the others are drawn.
const panesOf = (page) => [
  new MapPane(page), new HeadsPane(page, HeadPins), new HeaderPane(page), new ToolsPane(page), new TextPane(page),
  new ComparePane(page), new LinesPane(page), new PairPane(page), new EverywherePane(page),
];

const ADDRESS = {
  ...ADDRESS_OF_HEADS, ...ADDRESS_OF_TOKENS, ...ADDRESS_OF_TEXT, ...ADDRESS_OF_MAP, ...ADDRESS_OF_COMPARISON,
  ...ADDRESS_OF_LINES,
};

/**
 * `run`: the data. `view`: what is chosen, changed by `choose` alone. `shown`: what the panes show. A pane is made with
 * the page, shows in `paint(shown)`, and previews a pair in `hover(pair)`, `{ i, j }` or null. While a long head is being
 * read, `sketch(shown)` shows what a pane can without its weights. `close()` ends what a pane has begun outside the page.
 */
class Page {
  constructor(host, run, template) {
    this.host = host;
    this.run = run;
    this.root = host.attachShadow({ mode: "open" });
    this.root.append(template.content.cloneNode(true));
    this.texts = run.texts.map(readText);
    this.labels = labelsOf(run.layers);
    this.view = new View(run, ADDRESS);
    this.shown = null;
    this.hovered = null;
    this.turn = 0;
    this.step = false;
    this.onaddress = () => {};
    this.theme = new Theme(host, () => this.refresh());
    this.find("title").textContent = run.title;
    this.panes = panesOf(this);
    this.resized = new ResizeObserver(() => {
      clearTimeout(this.resizing);
      this.resizing = setTimeout(() => this.shown && this.room !== host.clientWidth && this.refresh(), 120);
    });
    this.resized.observe(host);
  }

  find(id) {
    return this.root.getElementById(id);
  }

  /** Ends all that would go on when the element is gone. */
  close() {
    this.turn = NaN; // no refresh goes on
    clearTimeout(this.resizing);
    this.resized.disconnect();
    this.theme.close();
    for (const pane of this.panes) pane.close?.();
  }

  /** Opens what an address names. */
  go(address) {
    this.view.read(address);
    this.step = false;
    return this.refresh();
  }

  /** Changes what is chosen, and the page with it. `step`: whether Back comes back to what was before. */
  choose(change, step = true) {
    this.view.change(change);
    return this.refresh(step);
  }

  /** Shows a pair in passing, in all panes: `{ i, j }`, either of them null where a whole token is meant. */
  hover(pair) {
    const same = pair?.i === this.hovered?.i && pair?.j === this.hovered?.j;
    if (same || !this.shown?.look) return;
    this.hovered = pair;
    for (const pane of this.panes) pane.hover?.(pair);
  }

  /** The words of the queries and of the keys of a layer. */
  namesOf(layer) {
    return [this.texts[layer.queryText], this.texts[layer.keyText]];
  }

  /** Chooses a token where the address names none. */
  chooseToken(head, names) {
    const { view } = this;
    if (view.token === null) view.token = tokenToOpen(head, view.view, names[view.view === "out" ? 0 : 1]);
  }

  scaleOf(head) {
    countsOf(head);
    return new Scale(this.view.scale, head.mostKeys, this.theme.dark);
  }

  /** Shows what can be shown before a head is read; nothing can be chosen until then. */
  sketch(head) {
    const { layer } = head;
    const names = this.namesOf(layer);
    this.chooseToken(head, names);
    this.root.querySelector("main").inert = true;
    this.shown = {
      head, layer, look: null, pair: null, i: null, j: null, names, view: this.view.view, scale: this.scaleOf(head),
    };
    for (const pane of this.panes) pane.sketch?.(this.shown);
  }

  async refresh(step = false) {
    const turn = ++this.turn;
    this.step ||= step; // a step that was overtaken, by a change of the room or the theme, is one still
    const { view } = this;
    if (this.shown === null) {
      const afar = await this.run.afar(view.layer, view.head);
      if (turn !== this.turn) return;
      if (afar.pyramid) this.sketch(afar);
    }
    const head = await this.run.open(view.layer, view.head);
    if (turn !== this.turn) return;
    const { layer } = head;
    const names = this.namesOf(layer);
    this.chooseToken(head, names);
    const look = lookOf(head, view.view, view.token);
    const pair = view.pair ?? look.ranked[0] ?? null;
    const [i, j] = view.view === "out" ? [view.token, pair] : [pair, view.token];
    const passing = view.address === this.painted ? this.hovered : null; // only the room or the theme has changed
    this.painted = view.address;
    this.room = this.host.clientWidth;
    this.hovered = null;
    this.shown = {
      head, layer, look, pair, i, j, names, view: view.view, scale: this.scaleOf(head),
    };
    this.root.querySelector("main").inert = false;
    this.onaddress(view.address, this.step);
    this.step = false;
    for (const pane of this.panes) pane.paint?.(this.shown);
    if (passing) this.hover(passing);
    this.host.dataset.shown = [view.layer, view.head, view.view, view.token, pair ?? "none"].join("/");
  }
}

/** The token that a head opens on: the one nearest the middle that is no special token and has a weight. */
function tokenToOpen(head, view, words) {
  const out = view === "out";
  const length = out ? head.queries : head.keys;
  const middle = Math.floor(length / 2);
  const good = (at) => !words[at].special && (!out || countsOf(head)[at] > 0);
  for (let away = 0; away < length; away++) {
    for (const at of [middle + away, middle - away]) if (at >= 0 && at < length && good(at)) return at;
  }
  return middle;
}

/** Shows a report in an element. It listens to nothing outside it: several may stand on one page. */
export const mount = (host, run, template) => new Page(host, run, template);
