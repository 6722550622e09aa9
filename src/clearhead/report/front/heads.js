// ---- All heads: their measures, and the choice of one.

import { closestTo, everyIn, make, withModifier } from "../../base/front/dom.js";
import { HeadList, HeadScatter } from "./heads_list.js";
import { HeadMatrix } from "./heads_matrix.js";
import { HeadsTop } from "./heads_top.js";
import { figureOf, figureWords, keyOf, mostDistinctive, placesIn, titleOf } from "./measures.js";
import { headName, roleOf, rowName } from "./names.js";
import { plural } from "./words.js";

/** @import { HeadAt, HeadPlace, Heads, PageOfHeads, PinsOfHeads, Readers } from "./types.d.ts" */

const SHOWS = ["squares", "maps", "list", "scatter"];

/**
 * @param {string | null | undefined} text
 * @param {Heads} run
 * @returns {string | null}
 */
const measureIn = (text, run) => (run.measures.find(({ name }) => name === text)?.name ?? null);

/** @satisfies {Readers} what this pane reads of the address */
export const ADDRESS_OF_HEADS = {
  by: measureIn,
  against: measureIn,
  show: (text) => (text !== null && SHOWS.indexOf(text) > 0 ? text : null),
  only: (text) => text || null,
  pins: (text, run) => placesIn(text, run).map(keyOf).join("_") || null,
};

/**
 * Whether a head fits what was typed: each word of it is a layer, a head, or a part of the name or role.
 *
 * @param {PageOfHeads} page
 * @param {HeadAt} place
 * @param {string} typed
 */
function fits(page, place, typed) {
  const layer = page.run.layers[place.layer];
  const name = headName(page, place).toLowerCase();
  const about = `${layer.name} ${roleOf(layer)} ${layer.kind} attention`.toLowerCase();
  const wanted = typed.toLowerCase().replaceAll("'", "′");
  if (/[ ,]/.test(wanted) && `${name},`.includes(`${wanted},`)) return true;
  const row = `l${rowName(page.labels[place.layer]).toLowerCase().replace(/^l/, "").split(", ")[0]}`;
  const head = `h${layer.heads[place.head].number ?? place.head}`;
  return wanted.split(/\s+/).every((word) => (
    /^(l\d+′?)?(h\d+)?$/.test(word) ? [row, head, row + head].includes(word) : about.includes(word) || name === word));
}

/** `Pins`: the class of the pinned and the compared heads. */
export class HeadsPane {
  /**
   * @param {PageOfHeads} page
   * @param {new (pane: HeadsPane) => PinsOfHeads} Pins
   */
  constructor(page, Pins) {
    this.page = page;
    const { run } = page;
    /** @type {HeadPlace[]} */
    this.places = run.layers.flatMap(({ heads }, layer) => heads.map((_, head) => (
      { layer, head, name: headName(page, { layer, head }), element: make("div", "head") })));
    /** @type {Set<string>} the heads that are pinned, and those that fit what was typed */
    this.pinned = new Set();
    /** @type {Set<HeadPlace>} */
    this.shown = new Set();
    // without a most distinctive head: the measure by which some head is furthest from uniform attention
    this.usual = mostDistinctive(run, this.places)[0]?.measure.name ?? run.measures[0]?.name ?? "";
    const squares = new HeadMatrix(this);
    /** @type {Record<string, { paint(): void }>} */
    this.parts = { list: new HeadList(this), scatter: new HeadScatter(this), squares, maps: squares };
    this.top = new HeadsTop(this);
    this.pins = new Pins(this);
    const [by, against] = [page.find("measure", HTMLSelectElement), page.find("against", HTMLSelectElement)];
    const only = page.find("only", HTMLInputElement);
    page.find("overview-title").textContent = `All ${plural(this.places.length, "head")}`;
    page.find("left-out").hidden = run.leftOut.length === 0;
    page.find("left-out").textContent = run.leftOut.map(({ name, reason }) => `Not shown: ${name}: ${reason}`).join(" ");
    for (const { name } of run.measures) {
      for (const choice of [by, against]) choice.append(new Option(titleOf(name), name));
    }
    by.addEventListener("change", () => page.choose({ by: by.value }));
    against.addEventListener("change", () => page.choose({ against: against.value }));
    only.addEventListener("input", () => page.choose({ only: only.value.trim() || null }, false));
    this.only = only;
    this.by = by;
    this.radios = everyIn(page.root, "#heads-as input", HTMLInputElement);
    for (const radio of this.radios) {
      radio.addEventListener("change", () => page.choose({ show: SHOWS.indexOf(radio.value) ? radio.value : null }));
    }
    page.find("overview").addEventListener("keydown", (event) => this.press(event));
  }

  /** The measure that heads are coloured and ranked by. */
  get measure() {
    const { run, view } = this.page;
    return view.by ?? measureIn(run.distinctive?.measure, run) ?? this.usual;
  }

  /**
   * @param {HeadAt} place
   * @param {string} [name]
   */
  figure(place, name = this.measure) {
    return figureOf(this.page.run, place, name);
  }

  /**
   * "L3H8, decoder, previous token 71%; uniform attention: 4%, pinned"
   *
   * @param {HeadPlace} place
   */
  words(place) {
    const layer = this.page.run.layers[place.layer];
    const said = this.measure ? `, ${figureWords(this.measure, this.figure(place))}` : "";
    return `${place.name}, ${roleOf(layer)}${said}${this.pinned.has(keyOf(place)) ? ", pinned" : ""}`;
  }

  /** @param {HeadAt} place */
  open(place) {
    this.page.choose({ layer: place.layer, head: place.head });
  }

  /**
   * `p` pins the head that has the focus, or the chosen one; `a` and `b` compare it.
   *
   * @param {KeyboardEvent} event
   */
  press(event) {
    if (withModifier(event) || closestTo(event.target, "input[type=search], select")) return;
    const place = this.places.find(({ element }) => element === this.page.root.activeElement) ?? this.page.view;
    if (event.key === "p") this.pins.toggle(place);
    else if (event.key === "a" || event.key === "b") this.page.choose({ [event.key]: keyOf(place) });
    else return;
    event.preventDefault();
  }

  sketch() {
    this.paint();
  }

  paint() {
    const { page } = this;
    const { view } = page;
    const show = view.show ?? SHOWS[0];
    this.pinned = new Set(view.pins?.split("_"));
    this.shown = new Set(this.places.filter((place) => view.only === null || fits(page, place, view.only)));
    this.by.value = this.measure;
    if (page.root.activeElement !== this.only) this.only.value = view.only ?? "";
    page.find("only-count").textContent = view.only === null ? ""
      : `${this.shown.size} of ${plural(this.places.length, "head")}`;
    for (const radio of this.radios) radio.checked = radio.value === show;
    page.find("heads").hidden = !["squares", "maps"].includes(show);
    page.find("head-list").hidden = show !== "list";
    page.find("scatter").hidden = show !== "scatter";
    this.top.paint();
    this.pins.paint();
    this.parts[show].paint();
    page.host.dataset.overview = "drawn";
  }
}
