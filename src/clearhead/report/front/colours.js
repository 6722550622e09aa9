// ---- Several heads over one text: each has a colour, and under each word are lines of the heads that attend to it.

import { make } from "../../base/front/dom.js";
import { Scale } from "./colour.js";
import { meaningAt, openUnder } from "./meanings.js";
import { keyOf, placesIn } from "./measures.js";
import { headName } from "./names.js";
import { run } from "./running.js";
import { countsOf, lookOf, mostKeysOf } from "./weights.js";
import { nameOf, percent } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { HeadAt, Look, Readers, Shown } from "./types.d.ts"
 */

const COLOURS = ["#1f6fb5", "#d55e00", "#009e73", "#b5478f", "#b08a00", "#5b4bc4", "#0e9fb3", "#a0522d"]; // seen on light and dark
const WHOLE = 2000; // tokens of a text that is shown

/** @satisfies {Readers} what this pane reads of the address: whether it is open */
export const ADDRESS_OF_COLOURS = { colours: (text) => (text === "1" ? "1" : null) };

export class ColoursPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.box = page.find("colours", HTMLDetailsElement);
    this.text = page.find("colours-text");
    this.legend = page.find("colours-heads");
    this.turn = 0;
    this.box.addEventListener("toggle", () => {
      const open = page.view.colours !== null;
      if (this.box.open !== open) page.choose({ colours: open ? null : "1" });
    });
    this.text.addEventListener("click", (event) => {
      const span = event.target instanceof HTMLElement ? event.target.closest("[data-index]") : null;
      if (span instanceof HTMLElement) this.take(Number(span.dataset.index));
    });
  }

  /** The shown head, then the pinned ones that read the same texts; at most as many as there are colours. */
  get places() {
    const { run: { layers }, view } = this.page;
    const own = layers[view.layer];
    /** @type {HeadAt[]} */
    const every = [{ layer: view.layer, head: view.head }, ...placesIn(view.pins, this.page.run)];
    const same = every.filter(({ layer }) => layers[layer].queryText === own.queryText && layers[layer].keyText === own.keyText);
    return [...new Map(same.map((place) => [keyOf(place), place])).values()].slice(0, COLOURS.length);
  }

  /** @param {Shown} shown */
  async paint(shown) {
    const { page } = this;
    this.box.open = page.view.colours !== null;
    if (!this.box.open) return;
    const turn = ++this.turn;
    const { view, own: token } = page.view;
    const out = view === "out";
    const words = shown.names[out ? 1 : 0];
    if (words.length > WHOLE) {
      this.say(`Texts of up to ${WHOLE} tokens are shown here.`);
      return;
    }
    /** @type {{ place: HeadAt, look: Look, scale: Scale }[]} */
    const found = [];
    for (const place of this.places) {
      const head = await openUnder(page.run, place, page.view.meaning);
      if (turn !== this.turn) return;
      found.push({ place, look: lookOf(head, view, token), scale: new Scale(page.view.scale, mostKeysOf(head), page.theme.dark) });
    }
    const meaning = meaningAt(page.run, page.view, page.view.meaning);
    this.say(`${out ? "Where" : "What looks at"} “${nameOf(shown.names[out ? 0 : 1], token)}”${out ? " looks" : ""}, by ` +
      `${meaning.title}: under a word is a line of each head that gives it more than the uniform share, the more the fuller. ` +
      (found.length > 1 ? "Click a word to choose it." : "Pin heads (p) to see them here together."));
    this.legend.replaceChildren(...found.map(({ place, look }, at) => {
      const chip = make("button", "chip");
      const colour = make("span", "swatch");
      colour.style.backgroundColor = COLOURS[at];
      const first = look.ranked[0];
      chip.append(colour, ` ${headName(page, place)}${first === undefined ? "" : ` → ${nameOf(words, first)} ${percent(look.weights[first])}`}`);
      chip.setAttribute("aria-current", String(at === 0));
      chip.addEventListener("click", () => page.choose({ layer: place.layer, head: place.head }));
      return chip;
    }));
    const text = make("div", "coloured");
    text.dir = "auto";
    text.style.setProperty("--heads", String(found.length));
    text.lang = "";
    const chosen = !out || shown.layer.queryText === shown.layer.keyText ? token : -1;
    run(text, words, (span, index) => {
      span.dataset.index = String(index);
      const bands = found.map(({ look, scale }) => strengthOf(look, scale, index));
      span.style.backgroundImage = bands.some((band) => band > 0) ? bandsOf(bands) : "";
      span.classList.toggle("chosen", index === chosen);
      const said = bands.flatMap((band, at) => (band > 0 ? `${headName(page, found[at].place)} ${percent(found[at].look.weights[index])}` : []));
      if (said.length) span.title = said.join(", ");
    });
    this.text.replaceChildren(text);
  }

  /** @param {string} words */
  say(words) {
    this.legend.replaceChildren();
    this.text.replaceChildren();
    this.page.find("colours-note").textContent = words;
  }

  /**
   * Chooses a word: of the text that is looked from, or in cross attention the other token of the pair.
   *
   * @param {number} index
   */
  take(index) {
    const { layer } = this.page.now;
    const own = layer.kind === "self" && layer.queryText === layer.keyText;
    this.page.choose(own ? { token: index, pair: null } : { pair: index });
  }
}

/**
 * How strongly a head colours a word, 0 to 1: 0 up to the uniform share.
 *
 * @param {Look} look
 * @param {Scale} scale
 * @param {number} index
 */
function strengthOf(look, scale, index) {
  const count = countsOf(look.head)[look.view === "out" ? look.token : index];
  const weight = look.weights[index];
  if (!(weight * count > 1)) return 0;
  const step = scale.step(scale.value(weight, count));
  return Math.max(0.08, scale.relative ? (step - 128) / 127 : step / 255);
}

/**
 * Lines of equal height, one for each head, as the picture under a word.
 *
 * @param {number[]} strengths
 */
function bandsOf(strengths) {
  const stops = strengths.flatMap((strength, at) => {
    const colour = strength > 0 ? `${COLOURS[at]}${Math.round(40 + 170 * strength).toString(16).padStart(2, "0")}` : "transparent";
    return [at, at + 1].map((edge) => `${colour} ${((100 * edge) / strengths.length).toFixed(2)}%`);
  });
  return `linear-gradient(${stops.join(", ")})`;
}
