// ---- A report in an element: the choices, the panes that show them, and the one function that changes them.

import { elementIn, firstIn } from "../../base/front/dom.js";
import { Theme } from "../../base/front/theme.js";
import { ADDRESS_OF_TOKENS } from "./chosen.js";
import { Scale } from "./colour.js";
import { ADDRESS_OF_COLOURS, ColoursPane } from "./colours.js";
import { ADDRESS_OF_COMPARISON, ComparePane } from "./compare.js";
import { EverywherePane } from "./everywhere.js";
import { HeaderPane } from "./header.js";
import { ADDRESS_OF_HEADS, HeadsPane } from "./heads.js";
import { ImagePane } from "./image.js";
import { ADDRESS_OF_LINES, LinesPane } from "./lines.js";
import { ADDRESS_OF_MAP, MapPane } from "./map.js";
import { ADDRESS_OF_MEANING, MeaningPane } from "./meaning_pane.js";
import { meaningAt, MEANINGS, openUnder } from "./meanings.js";
import { ALONE } from "./measures.js";
import { labelsOf } from "./names.js";
import { PairPane } from "./pair.js";
import { HeadPins } from "./pins.js";
import { ADDRESS_OF_ALL, isSimple, needsAll } from "./simple.js";
import { ADDRESS_OF_TEXT, TextPane } from "./text.js";
import { ToolsPane } from "./tools.js";
import { View } from "./view.js";
import { countsOf, lookOf, mostKeysOf } from "./weights.js";
import { readText } from "./words.js";

/**
 * @import { Run } from "./data.js"
 * @import { Afar, Change, Direction, Layer, Names, Pair, Pane, Shown, Sketch, Word } from "./types.d.ts"
 */

/**
 * Each pane shows the choices in its own part. The map is first: its worker computes while the others are drawn.
 *
 * @param {Page} page
 * @returns {Pane[]}
 */
const panesOf = (page) => [
  new MapPane(page), new HeadsPane(page, HeadPins), new HeaderPane(page), new MeaningPane(page), new ToolsPane(page),
  new ImagePane(page), new TextPane(page), new ComparePane(page), new ColoursPane(page), new LinesPane(page), new PairPane(page), new EverywherePane(page),
];

const LINGER = 60; // milliseconds that a pointer stays before all that is shown of a pair is drawn

const ADDRESS = {
  ...ADDRESS_OF_HEADS, ...ADDRESS_OF_TOKENS, ...ADDRESS_OF_TEXT, ...ADDRESS_OF_MAP, ...ADDRESS_OF_COMPARISON,
  ...ADDRESS_OF_LINES, ...ADDRESS_OF_MEANING, ...ADDRESS_OF_COLOURS, ...ADDRESS_OF_ALL,
};

/**
 * `run`: the data. `view`: what is chosen, changed by `choose` alone. `shown`: what the panes show. A pane is made with
 * the page, shows in `paint(shown)`, and previews a pair in `hover(pair)`, `{ i, j }` or null; what takes longer to draw is
 * drawn in `linger(shown)` once the pointer has stayed, or left. While a long head is being read, `sketch(shown)` shows what
 * a pane can without its weights. `close()` ends what a pane has begun outside the page.
 */
export class Page {
  /**
   * @param {HTMLElement} host
   * @param {Run} run
   * @param {HTMLTemplateElement} template
   */
  constructor(host, run, template) {
    this.host = host;
    this.run = run;
    this.root = host.attachShadow({ mode: "open" });
    this.root.append(template.content.cloneNode(true));
    this.texts = run.texts.map(readText);
    for (const { name, alone } of run.measures) if (alone) ALONE.add(name);
    this.labels = labelsOf(run.layers);
    this.view = new View(run, ADDRESS);
    /** @type {Shown | Sketch | null} */
    this.shown = null;
    /** @type {Pair | null} */
    this.hovered = null;
    /** @type {Shown | null} the token and the pair that are pointed at */
    this.passing = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.lingering = undefined;
    this.turn = 0;
    this.step = false;
    this.room = 0; // the width for which it was painted
    this.painted = ""; // the address for which it was painted
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.resizing = undefined;
    /** @type {(address: string, step: boolean) => void} */
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

  /**
   * @template {Element} [Kind=HTMLElement]
   * @param {string} id
   * @param {new () => Kind} [kind]
   */
  find(id, kind) {
    return elementIn(this.root, id, kind);
  }

  /** The shown head, once it has been read. */
  get now() {
    if (!this.shown?.look) throw new Error("the head is still being read");
    return this.shown;
  }

  /** The same with the token and the pair that are pointed at, if any: all panes show the weights of one token at a time. */
  get current() {
    return this.passing ?? this.now;
  }

  /** The shown head, also while a long head is being read. */
  get drawn() {
    if (!this.shown) throw new Error("nothing is shown yet");
    return this.shown;
  }

  /** The element with all controls that need a head. */
  get main() {
    return firstIn(this.root, "main", HTMLElement);
  }

  /** Ends all work that would continue after the element is removed. */
  close() {
    this.turn = NaN; // stops a refresh
    clearTimeout(this.resizing);
    clearTimeout(this.lingering);
    this.resized.disconnect();
    this.theme.close();
    for (const pane of this.panes) pane.close?.();
  }

  /**
   * Opens the choices of an address.
   *
   * @param {string} address
   */
  go(address) {
    this.view.read(address);
    this.step = false;
    return this.refresh();
  }

  /**
   * Changes the choices, and the page with them. `step`: whether Back returns to the choices before.
   *
   * @param {Change} change
   * @param {boolean} [step]
   */
  choose(change, step = true) {
    this.view.change(needsAll(change) ? { ...change, all: "1" } : change);
    return this.refresh(step);
  }

  /**
   * Shows a pair in passing, in all panes: `{ i, j }`, either of them null where a whole token is meant. `view`: "out" shows
   * the weights of the pair's query, "in" those of its key.
   *
   * @param {Pair | null} pair
   * @param {Direction} [view]
   */
  hover(pair, view = this.view.view) {
    if (!this.shown?.look) return;
    const same = pair?.i === this.hovered?.i && pair?.j === this.hovered?.j && view === this.current.view;
    if (same) return;
    this.hovered = pair;
    this.passing = pair && this.pointedAt(pair, view);
    for (const pane of this.panes) pane.hover?.(pair);
    clearTimeout(this.lingering);
    this.lingering = setTimeout(() => this.panes.forEach((pane) => pane.linger?.(this.current)), LINGER);
  }

  /**
   * What is shown of a pair that is pointed at; null where it has no token of this direction.
   *
   * @param {Pair} pair
   * @param {Direction} view
   * @returns {Shown | null}
   */
  pointedAt({ i, j }, view) {
    const shown = this.now;
    const [token, other] = view === "out" ? [i, j] : [j, i];
    if (token === null) return null;
    const known = [shown.look, this.passing?.look].find((one) => one?.head === shown.head && one.view === view && one.token === token);
    const look = known ?? lookOf(shown.head, view, token);
    const pair = other ?? look.ranked[0] ?? null;
    return { ...shown, view, look, pair, ...(view === "out" ? { i: token, j: pair } : { i: pair, j: token }) };
  }

  /**
   * The words of the queries and of the keys of a layer.
   *
   * @param {Layer} layer
   * @returns {Names}
   */
  namesOf(layer) {
    return [this.texts[layer.queryText], this.texts[layer.keyText]];
  }

  /**
   * Chooses a token where the address names none.
   *
   * @param {Afar} head
   * @param {Names} names
   */
  chooseToken(head, names) {
    const { view } = this;
    if (view.token === null) view.token = tokenToOpen(head, view.view, names[view.view === "out" ? 0 : 1]);
  }

  /** @param {Afar} head */
  scaleOf(head) {
    return new Scale(this.view.scale, mostKeysOf(head), this.theme.dark);
  }

  /**
   * Shows the parts that need no read head; nothing can be chosen until the head is read.
   *
   * @param {Afar} head
   */
  sketch(head) {
    const { layer } = head;
    const names = this.namesOf(layer);
    this.chooseToken(head, names);
    this.main.inert = true;
    /** @type {Sketch} */
    const shown = {
      head, layer, look: null, pair: null, i: null, j: null, names, view: this.view.view, scale: this.scaleOf(head),
      meaning: MEANINGS[0],
    };
    this.shown = shown;
    for (const pane of this.panes) pane.sketch?.(shown);
  }

  async refresh(step = false) {
    const turn = ++this.turn;
    this.step ||= step; // a step that a change of the room or the theme has overtaken is still a step
    const { view } = this;
    const { activeElement } = this.root;
    this.host.toggleAttribute("data-simple", isSimple(view));
    if (activeElement && !activeElement.checkVisibility()) this.find("all").focus(); // else the focus would be lost
    if (this.shown === null) {
      const afar = await this.run.afar(view.layer, view.head);
      if (turn !== this.turn) return;
      if (afar.pyramid) this.sketch(afar);
    }
    const meaning = meaningAt(this.run, view, view.meaning);
    const head = await openUnder(this.run, view, view.meaning);
    if (turn !== this.turn) return;
    const { layer } = head;
    const names = this.namesOf(layer);
    this.chooseToken(head, names);
    const token = view.own;
    const look = lookOf(head, view.view, token);
    const pair = view.pair ?? look.ranked[0] ?? null;
    const [i, j] = view.view === "out" ? [token, pair] : [pair, token];
    /** @type {[Pair | null, Direction]} of which only the room or the theme has changed */
    const passing = [view.address === this.painted ? this.hovered : null, this.passing?.view ?? view.view];
    this.painted = view.address;
    this.room = this.host.clientWidth;
    this.hovered = this.passing = null;
    clearTimeout(this.lingering);
    const shown = { head, layer, look, pair, i, j, names, view: view.view, scale: this.scaleOf(head), meaning };
    this.shown = shown;
    this.main.inert = false;
    this.onaddress(view.address, this.step);
    this.step = false;
    for (const pane of this.panes) pane.paint?.(shown);
    if (passing[0]) this.hover(...passing);
    this.host.dataset.shown = [view.layer, view.head, view.view, token, pair ?? "none"].join("/");
  }
}

/**
 * The token that a head opens on: the one nearest the middle that is no special token and has a weight.
 *
 * @param {Afar} head
 * @param {Direction} view
 * @param {Word[]} words
 */
function tokenToOpen(head, view, words) {
  const out = view === "out";
  const length = out ? head.queries : head.keys;
  const middle = Math.floor(length / 2);
  /** @param {number} at */
  const good = (at) => !words[at].special && (!out || countsOf(head)[at] > 0);
  for (let away = 0; away < length; away++) {
    for (const at of [middle + away, middle - away]) if (at >= 0 && at < length && good(at)) return at;
  }
  return middle;
}

/**
 * The content of a report's element, from its text.
 *
 * @param {string} markup
 */
export function templateOf(markup) {
  const template = document.createElement("template");
  template.innerHTML = markup;
  return template;
}

/**
 * Shows a report in an element. It listens to no events outside the element, so several may stand on one page.
 *
 * @param {HTMLElement} host
 * @param {Run} run
 * @param {HTMLTemplateElement} template
 */
export const mount = (host, run, template) => new Page(host, run, template);
