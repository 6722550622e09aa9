// ---- The page of a survey: the heads of a model, by statistics over many texts. It has no calls.

import { addressFrom, followAddress, writeAddress } from "../../base/front/address.js";
import { elementIn, firstIn, make } from "../../base/front/dom.js";
import { Theme } from "../../base/front/theme.js";
import { listOf } from "./examples.js";
import { ADDRESS_OF_HEADS, HeadsPane } from "./heads.js";
import { ALONE, queriesWords, RATIOS, titleOf, valueWords } from "./measures.js";
import { headName, labelsOf } from "./names.js";
import { View } from "./view.js";

/** @import { Change, Heads, MeasureFigure, Readers, SurveyFigure, SurveyMeta } from "./types.d.ts" */

/** The view of heads alone: an address has no token. */
class SurveyView extends View {
  get address() {
    return addressFrom([["layer", this.layer], ["head", this.head], ...this.added]);
  }
}

/** The part of the address that is read: there are no small maps, and no pins. */
const { by, against, only } = ADDRESS_OF_HEADS;

/** @type {Readers} */
const ADDRESS = { by, against, show: (text) => (text === "list" || text === "scatter" ? text : null), only };

/** There is no second call to compare a head with. */
class NoPins {
  toggle() {}

  paint() {}
}

/**
 * The parts of a recording that the panes of the report read, from the page's data.
 *
 * @param {SurveyMeta} meta
 * @returns {Heads}
 */
function runOf(meta) {
  meta.measures.forEach(({ name, share }, number) => {
    if (!share) RATIOS.add(name);
    if (meta.layers.every(({ heads }) => heads.every(({ measures }) => !(measures[number] || [0])[1]))) ALONE.add(name);
  });
  /** @param {(SurveyFigure | 0)[]} values */
  const named = (values) => {
    /** @type {Record<string, MeasureFigure>} */
    const found = {};
    values.forEach((value, place) => {
      if (value) found[meta.measures[place].name] = [value[0], value[1] ?? 0, null, value[2] ?? null];
    });
    return found;
  };
  const layers = meta.layers.map((layer) => ({
    ...layer, kind: "self", queries: 1, keys: 1, queryText: 0, keyText: 0,
    heads: layer.heads.map((head) => ({ ...head, measures: named(head.measures) })),
  }));
  return { title: meta.title, measures: meta.measures, layers, first: { layer: 0, head: 0 }, distinctive: null, leftOut: [], beside: [] };
}

class SurveyPage {
  /**
   * @param {HTMLElement} host
   * @param {SurveyMeta} meta
   * @param {HTMLTemplateElement} template
   */
  constructor(host, meta, template) {
    this.host = host;
    this.root = host.attachShadow({ mode: "open" });
    this.root.append(template.content.cloneNode(true));
    firstIn(this.root, "label:has([value=maps])", HTMLElement).remove();
    this.meta = meta;
    this.run = runOf(meta);
    this.labels = labelsOf(this.run.layers);
    this.view = new SurveyView(this.run, ADDRESS);
    this.theme = new Theme(host, () => this.paint());
    this.find("title").textContent = meta.title;
    this.find("where").textContent = meta.said;
    this.find("theme").addEventListener("click", () => this.theme.turn());
    this.room = 0; // the width for which it was painted
    /** @type {HeadsPane | null} */
    this.pane = new HeadsPane(this, NoPins);
    new ResizeObserver(() => this.room !== host.clientWidth && this.paint()).observe(host);
  }

  /**
   * @template {Element} [Kind=HTMLElement]
   * @param {string} id
   * @param {new () => Kind} [kind]
   */
  find(id, kind) {
    return elementIn(this.root, id, kind);
  }

  /** @param {string} address */
  go(address) {
    this.view.read(address);
    this.paint();
  }

  /** @param {Change} change */
  choose(change) {
    this.view.change(change);
    this.paint();
    writeAddress(this.view.address, false);
  }

  paint() {
    if (!this.pane) return;
    this.room = this.host.clientWidth;
    this.find("theme").textContent = this.theme.dark ? "Light" : "Dark";
    this.pane.paint();
    const { layer, head } = this.view;
    this.find("one").textContent = `${headName(this, this.view)} · ${this.run.layers[layer].name}`;
    const { measures } = this.run.layers[layer].heads[head];
    this.find("figures").replaceChildren(...this.run.measures.flatMap(({ name }) => {
      const [value, uniform] = measures[name] ?? [null, null];
      const said = value === null ? "–" : valueWords(name, value);
      const beside = value === null || ALONE.has(name) ? "" : ` (uniform ${valueWords(name, uniform)})`;
      return [make("dt", "", titleOf(name)), make("dd", "", said + beside + queriesWords(measures[name]?.[3]))];
    }));
    const { measure } = this.pane;
    const own = this.meta.layers[layer].heads[head].examples;
    const kept = own[this.meta.measures.findIndex(({ name }) => name === measure)] ?? [];
    this.find("examples-about").hidden = !this.meta.words.length;
    this.find("examples-title").textContent = `Its strongest examples of “${titleOf(measure)}”`;
    this.find("examples").replaceChildren(...listOf(measure, kept, this.meta.words));
  }
}

/** @type {SurveyMeta} */
const meta = JSON.parse(elementIn(document, "meta").textContent);
const host = elementIn(document, "clearhead");
host.hidden = false;
const page = new SurveyPage(host, meta, elementIn(document, "clearhead-page", HTMLTemplateElement));
followAddress((address) => address !== page.view.address && page.go(address));
page.go(window.location.hash);
