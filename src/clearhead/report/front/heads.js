// ---- All heads: what each does, and the choice among them.

import { HeadList, HeadScatter } from "./heads_list.js";
import { HeadMatrix } from "./heads_matrix.js";
import { HeadsTop } from "./heads_top.js";
import { figureOf, figureWords, keyOf, placesIn, titleOf } from "./measures.js";
import { headName, roleOf } from "./names.js";
import { plural } from "./words.js";

const SHOWS = ["squares", "maps", "list", "scatter"];
const measureIn = (text, run) => (run.measures.some(({ name }) => name === text) ? text : null);

/** What this pane reads of the address. */
export const ADDRESS_OF_HEADS = {
  by: measureIn,
  against: measureIn,
  show: (text) => (SHOWS.indexOf(text) > 0 ? text : null),
  only: (text) => text || null,
  pins: (text, run) => placesIn(text, run).map(keyOf).join("_") || null,
};

/** Whether a head fits what was typed: each word of it is a layer, a head, or a part of the name or role. */
function fits(page, place, typed) {
  const layer = page.run.layers[place.layer];
  const name = headName(page, place).toLowerCase();
  const about = `${layer.name} ${roleOf(layer)} ${layer.kind} attention`.toLowerCase();
  return typed.toLowerCase().replaceAll("'", "′").split(/\s+/).every((word) => (
    /^(l\d+′?)?(h\d+)?$/.test(word)
      ? name === word || (!word.includes("h") && name.startsWith(`${word}h`)) || (word[0] === "h" && name.endsWith(word))
      : about.includes(word) || name === word));
}

/** `Pins`: the class of what is pinned and compared. */
export class HeadsPane {
  constructor(page, Pins) {
    this.page = page;
    const { run } = page;
    this.places = run.layers.flatMap(({ heads }, layer) => heads.map((_, head) => ({ layer, head })));
    for (const place of this.places) place.name = headName(page, place);
    this.parts = { list: new HeadList(this), scatter: new HeadScatter(this), squares: new HeadMatrix(this) };
    this.parts.maps = this.parts.squares;
    this.top = new HeadsTop(this);
    this.pins = new Pins(this);
    page.find("overview-title").textContent = `All ${plural(this.places.length, "head")}`;
    page.find("left-out").hidden = run.leftOut.length === 0;
    page.find("left-out").textContent = run.leftOut.map(({ name, reason }) => `Left out: ${name}: ${reason}`).join(" ");
    for (const { name } of run.measures) {
      for (const id of ["measure", "against"]) page.find(id).append(new Option(titleOf(name), name));
    }
    page.find("measure").addEventListener("change", (event) => page.choose({ by: event.target.value }));
    page.find("against").addEventListener("change", (event) => page.choose({ against: event.target.value }));
    page.find("only").addEventListener("input", (event) => page.choose({ only: event.target.value.trim() || null }, false));
    this.radios = page.root.querySelectorAll("#heads-as input");
    for (const radio of this.radios) {
      radio.addEventListener("change", () => page.choose({ show: SHOWS.indexOf(radio.value) ? radio.value : null }));
    }
    page.find("overview").addEventListener("keydown", (event) => this.press(event));
  }

  /** The measure that heads are coloured and ranked by. */
  get measure() {
    const { run, view } = this.page;
    return view.by ?? measureIn(run.distinctive?.measure, run) ?? run.measures[0]?.name ?? "";
  }

  figure(place, name = this.measure) {
    return figureOf(this.page.run, place, name);
  }

  /** "L3H8, decoder, previous token 71%, uniform would be 4%, pinned" */
  words(place) {
    const layer = this.page.run.layers[place.layer];
    const said = this.measure ? `, ${figureWords(this.measure, this.figure(place))}` : "";
    return `${place.name}, ${roleOf(layer)}${said}${this.pinned.has(keyOf(place)) ? ", pinned" : ""}`;
  }

  open(place) {
    this.page.choose({ layer: place.layer, head: place.head });
  }

  /** `p` pins the head that has the focus, or the chosen one; `a` and `b` compare it. */
  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input[type=search], select")) return;
    const place = this.places.find(({ element }) => element === this.page.root.activeElement) ?? this.page.view;
    if (event.key === "p") this.pins.toggle(place);
    else if (event.key === "a" || event.key === "b") this.page.choose({ [event.key]: keyOf(place) });
    else return;
    event.preventDefault();
  }

  sketch(shown) {
    this.paint(shown);
  }

  paint(shown) {
    const { page } = this;
    const { view } = page;
    const show = view.show ?? SHOWS[0];
    this.pinned = new Set(view.pins?.split("_"));
    this.shown = new Set(this.places.filter((place) => view.only === null || fits(page, place, view.only)));
    page.find("measure").value = this.measure;
    if (page.root.activeElement !== page.find("only")) page.find("only").value = view.only ?? "";
    page.find("only-count").textContent = view.only === null ? ""
      : `${this.shown.size} of ${plural(this.places.length, "head")}`;
    for (const radio of this.radios) radio.checked = radio.value === show;
    page.find("heads").hidden = !["squares", "maps"].includes(show);
    page.find("head-list").hidden = show !== "list";
    page.find("scatter").hidden = show !== "scatter";
    this.top.paint();
    this.pins.paint();
    this.parts[show].paint(shown);
    page.host.dataset.overview = "drawn";
  }
}
