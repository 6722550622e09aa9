// ---- The most distinctive heads, the meaning of the chosen measure, and of its colours.

import { make } from "../../base/front/dom.js";
import { Scale } from "./colour.js";
import { ALONE, figureWords, limitOf, limitWords, mostDistinctive, NATS, shareWords } from "./measures.js";
import { headName, isSecond } from "./names.js";
import { drawRamp, signedTables } from "./signed.js";
import { nameOf, times } from "./words.js";

/**
 * @import { HeadsPane } from "./heads.js"
 * @import { HeadAt } from "./types.d.ts"
 */

export class HeadsTop {
  /** @param {HeadsPane} pane */
  constructor(pane) {
    this.pane = pane;
    const { page } = pane;
    const { distinctive } = page.run;
    /** @type {[HTMLElement, HeadAt][]} */
    this.buttons = [];
    /**
     * @param {HTMLElement} button
     * @param {HeadAt} place
     * @param {string} by
     * @param {string} text
     */
    const offer = (button, place, by, text) => {
      button.textContent = text;
      const { layer, head } = place;
      button.addEventListener("click", () => page.choose(
        { layer, head, by: page.host.hasAttribute("data-simple") ? null : by, pair: null }));
      this.buttons.push([button, place]);
      return button;
    };
    const top = page.find("distinctive");
    top.hidden = distinctive === null;
    top.toggleAttribute("data-given", distinctive !== null && ALONE.has(distinctive.measure)); // an effect, which the simple view says too
    if (distinctive !== null) offer(top, distinctive, distinctive.measure, distinctive.sentence);
    const five = mostDistinctive(page.run, pane.places.filter(({ layer }) => !isSecond(page.run.layers[layer])));
    page.find("five").hidden = five.length === 0;
    page.find("five-title").hidden = five.length === 0;
    page.find("five-title").textContent = five.length > 1 ? "Heads far from uniform attention, each by its strongest measure" : "The head furthest from uniform attention";
    page.find("five").append(...five.map(({ place, measure, figure }) => {
      const { layer, head } = place;
      const name = headName(page, place);
      const button = offer(make("button", "chip"), { layer, head }, measure.name,
        `${name} ${measure.name} ${shareWords(figure.value)}`);
      button.title = `${name} ${measure.does}: ${shareWords(figure.value)}; uniform attention: ${shareWords(figure.uniform)}`;
      return button;
    }));
  }

  /** The meaning of the colours of the squares, or of the small maps. */
  explain() {
    const { page, measure, places } = this.pane;
    const { dark } = page.theme;
    const maps = page.view.show === "maps";
    const plain = maps || page.view.show === null;
    for (const id of ["heads-ramp", "heads-ticks"]) page.find(id).hidden = !plain;
    page.find("maps-about").hidden = !maps;
    if (!plain) return;
    const scale = new Scale("uniform", page.run.layers[page.view.layer].keys, dark);
    const signs = signedTables[dark ? "dark" : "light"];
    const figures = places.map((place) => this.pane.figure(place));
    const below = figures.every((figure) => (figure?.departs ?? 0) <= 0); // as an entropy always is
    const from = measure === NATS ? 128 : 0; // the half of the colours that the measure has, as the whole ramp
    const half = signs.map((_, at) => signs[3 * (from + Math.floor(at / 6)) + (at % 3)]);
    drawRamp(page.find("heads-ramp", HTMLCanvasElement), maps ? scale.table : measure === NATS || below ? half : signs);
    const words = maps ? ["≤ 1/64 ×", "1 × uniform", times(scale.most)] : limitWords(measure, limitOf(measure, figures), below);
    page.find("heads-ticks").replaceChildren(...words.map((text) => make("span", "", text)));
  }

  /** The sentence about the most distinctive head while that head is shown; about another head it would mislead. */
  headline() {
    const { page } = this.pane;
    const { distinctive } = page.run;
    if (distinctive === null || distinctive.nearUniform) return;
    const { layer, head, sentence, measure } = distinctive;
    const shown = page.view.layer === layer && page.view.head === head;
    const alone = measure === NATS ? "differs most" : `has the largest ${measure}`;
    const does = ALONE.has(measure) ? alone : "is furthest from uniform attention";
    page.find("distinctive").textContent = shown ? sentence : `Go to ${headName(page, distinctive)}, which ${does}`;
  }

  paint() {
    const { page, measure: name } = this.pane;
    const { layer, head } = page.view;
    this.headline();
    for (const [button, place] of this.buttons) {
      button.setAttribute("aria-current", String(place.layer === layer && place.head === head));
    }
    const measure = page.run.measures.find((one) => one.name === name);
    page.find("measure-about").hidden = measure === undefined;
    if (measure === undefined) return;
    const here = this.pane.figure({ layer, head });
    const words = page.texts?.[page.run.layers[layer].keyText];
    page.find("measure-here").textContent = `${headName(page, { layer, head })}: ${figureWords(name, here)}` +
      (words && typeof here?.key === "number" ? ` (${nameOf(words, here.key)})` : "");
    page.find("measure-says").textContent = measure.says;
    page.find("measure-formula").textContent = `${measure.formula}. From ${measure.range.replace(/^from /i, "")}.`;
    this.explain();
  }
}
