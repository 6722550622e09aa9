// ---- The text itself: tokens are chosen in it, and the tokens that they look at are shaded.

import { draw, make } from "../../base/front/dom.js";
import { grouped } from "../../base/front/numbers.js";
import { drawArcs, worthDrawing } from "./arcs.js";
import { chosenOf, meanLook, oneLook, rangesOf } from "./chosen.js";
import { Find } from "./find.js";
import { isWeights } from "./meaning_words.js";
import { Prose } from "./prose.js";
import { turnArcs, withArcs } from "./simple.js";
import { Strip } from "./strip.js";
import { listenTo } from "./take.js";
import { oneText } from "./view.js";
import { countsOf, lookOf } from "./weights.js";
import { nameOf, pairName, percent } from "./words.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Direction, Layer, Listing, Look, Pair, Readers, Shading, Shown, Sketch } from "./types.d.ts"
 */

const SWITCHES = /** @type {const} */ (["arcs", "spelling"]);
const REST = 250; // milliseconds that a pointer rests on a token before the token's own weights are shown

/** @satisfies {Readers} what this pane reads of the address */
export const ADDRESS_OF_TEXT = {
  arcs: (text) => (text === "0" || text === "1" ? text : null),
  spelling: (text) => (text === "1" ? "1" : null),
};

export class TextPane {
  /** @param {Page} page */
  constructor(page) {
    this.page = page;
    this.holds = ""; // the texts in the pane
    /** @type {Listing[]} */
    this.listings = []; // one listing for a text that looks at itself, two (query, key) for cross attention
    /** @type {Shading | null} what is shaded */
    this.shading = null;
    /** @type {Set<number>} */
    this.chosen = new Set();
    /** @type {HTMLElement[]} */
    this.passing = []; // spans that are outlined because a pointer is on them
    this.revealed = "";
    this.previewing = false; // whether the shading is a preview
    this.width = 0;
    this.turn = 0;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.resting = undefined;
    this.arcs = draw("svg", { class: "arcs", "aria-hidden": "true" });
    this.finder = new Find(page, this);
    for (const name of SWITCHES) {
      page.find(name).addEventListener("click", () => page.choose(
        name === "arcs" ? turnArcs(page.view) : { [name]: page.view[name] ? null : "1" }));
    }
  }

  /** @param {Layer} layer */
  build(layer) {
    const { page } = this;
    const single = oneText(layer);
    const wanted = JSON.stringify([layer.queryText, layer.keyText, single, layer.answer ?? null, layer.kind]);
    if (wanted === this.holds) return;
    this.holds = wanted;
    this.shading = null;
    const cross = layer.kind === "cross";
    /** @type {Pick<Listing, "side" | "text" | "title">[]} for a text that looks at itself one, for cross attention two */
    const listings = single
      ? [{ side: "both", text: layer.queryText, title: "text" }]
      : [
        { side: "query", text: layer.queryText, title: cross ? "decoder text: the queries" : "text of the queries" },
        { side: "key", text: layer.keyText, title: cross ? "encoder text: the keys" : "text of the keys" },
      ];
    const box = page.find("texts");
    box.replaceChildren();
    this.listings = listings.map(({ side, text, title }) => {
      if (!single) box.append(make("h3", "", title));
      const prose = new Prose(page.texts[text], title, (span, index) => this.shading && this.dress(listing, span, index), {
        answer: side === "key" ? null : layer.answer ?? null,
        originals: page.run.originals?.[text] ?? {},
      });
      /** @type {Listing} */
      const listing = { side, text, title, prose, strip: new Strip(prose), over: null };
      prose.moved = () => this.drawOver();
      listenTo(listing, this);
      const reader = make("div", "reader");
      reader.append(prose.element, listing.strip.canvas);
      box.append(reader);
      return listing;
    });
    box.append(this.arcs);
    const unknown = this.listings.some(({ prose }) => Object.keys(prose.originals).length > 0);
    page.find("spelling").hidden = !unknown;
  }

  /** The listing that holds the chosen tokens. */
  get holding() {
    const out = this.page.view.view === "out";
    const found = this.listings.find(({ side }) => side === "both" || (side === "query") === out);
    if (!found) throw new Error("no text is shown yet");
    return found;
  }

  /** @param {"query" | "key"} side */
  proseOf(side) {
    const found = this.listings.find((one) => one.side === "both" || one.side === side);
    if (!found) throw new Error("no text is shown yet");
    return found.prose;
  }

  /**
   * Whether the shaded tokens are in this listing.
   *
   * @param {Listing} given
   */
  isShaded({ side }) {
    return side === "both" || (side === "query") !== (this.shading?.view === "out");
  }

  /**
   * @param {Listing} listing
   * @param {HTMLElement} span
   * @param {number} index
   */
  dress(listing, span, index) {
    const { shading, page, chosen } = this;
    if (!shading) return;
    const { scale, pair } = page.now;
    const holds = listing === this.holding;
    const shaded = this.isShaded(listing) && shading.weights[index] > shading.fair[index];
    const step = shaded ? scale.step(scale.value(shading.weights[index], 1 / shading.fair[index])) : 0;
    span.style.backgroundColor = shaded ? scale.css(step) : "";
    span.style.color = shaded ? scale.ink(step) : "";
    const isChosen = holds && chosen.has(index);
    const others = listing.side === "both" || !holds;
    span.classList.toggle("chosen", isChosen);
    span.classList.toggle("pair", others && index === pair);
    const mark = this.finder.markOf(listing, index);
    span.classList.toggle("found", mark !== "");
    span.classList.toggle("current", mark.endsWith("current"));
    span.setAttribute("aria-selected", String(isChosen));
    span.tabIndex = index === listing.prose.at ? 0 : -1;
  }

  dressAll() {
    for (const listing of this.listings) listing.prose.spans.forEach((span, index) => this.dress(listing, span, index));
    this.drawOver();
  }

  /** Draws the arcs over the texts and the strips beside them. */
  drawOver() {
    const { shading, page } = this;
    if (!shading) return;
    for (const listing of this.listings) {
      const marked = listing === this.holding ? this.chosen : [];
      listing.strip.draw(this.isShaded(listing) ? shading : null, page.now.scale, marked, page.theme.colours);
    }
    const pairs = withArcs(page.view) ? shading.strongest : [];
    drawArcs(this.arcs, pairs, shading.view, (side) => this.proseOf(side));
  }

  /**
   * The words, not shaded yet.
   *
   * @param {Sketch} given
   */
  sketch({ layer }) {
    this.build(layer);
    this.holding.prose.reveal(this.page.view.own);
  }

  /** @param {Shown} shown */
  paint(shown) {
    const { page } = this;
    const { look, pair, layer } = shown;
    this.build(layer);
    this.hover(page.hovered);
    const tokens = chosenOf(page.view);
    this.chosen = new Set(tokens);
    const { holding } = this;
    const arcs = withArcs(page.view);
    for (const name of SWITCHES) {
      page.find(name).setAttribute("aria-pressed", String(name === "arcs" ? arcs : page.view[name] !== null));
    }
    for (const { prose } of this.listings) {
      prose.element.classList.toggle("spaced", arcs);
      prose.respell(page.view.spelling !== null);
      const inside = prose.element.contains(page.root.activeElement);
      if (prose !== holding.prose) prose.stand(pair ?? 0);
      else if (!inside || !this.chosen.has(prose.at)) prose.stand(look.token);
      prose.look();
    }
    clearTimeout(this.resting);
    this.show(look.view, tokens, look);
    const width = this.arcs.clientWidth;
    if (width !== this.width) for (const { prose } of this.listings) prose.resized();
    this.width = width;
    const wanted = `${this.holds} ${look.view} ${look.token}`;
    if (wanted !== this.revealed) holding.prose.reveal(look.token);
    this.revealed = wanted;
  }

  /**
   * Shades the tokens at which some tokens look, or that look at them. `look`: the weights of one of them, where known.
   *
   * @param {Direction} view
   * @param {number[]} tokens
   * @param {Look | null} [look]
   * @param {boolean} [preview]
   */
  async show(view, tokens, look = null, preview = false) {
    const { head } = this.page.now;
    const turn = ++this.turn;
    const found = look !== null && tokens.length === 1 ? oneLook(look)
      : await meanLook(head, view, tokens, () => turn === this.turn);
    if (found === null || turn !== this.turn || head !== this.page.now.head) return;
    this.shading = { view, tokens, ...found, strongest: worthDrawing(found.strongest) };
    this.dressAll();
    this.say(preview);
    this.page.find("texts").dataset.shaded = rangesOf(tokens);
  }

  /** @param {boolean} preview */
  say(preview) {
    const { page, shading, chosen } = this;
    if (!shading) return;
    const { names, head, layer, meaning } = page.now;
    const { tokens, view } = shading;
    const out = view === "out";
    /** @param {number} index */
    const nameAt = (index) => `“${nameOf(names[out ? 0 : 1], index)}”`;
    const who = tokens.length === 1 ? nameAt(tokens[0]) : `${grouped(tokens.length)} tokens`;
    page.find("prose-title").textContent = tokens.length === 1
      ? `${out ? `Where ${who} looks` : `What looks at ${who}`}${preview ? ", in passing" : ""}`
      : `${out ? `Where ${who} look` : `What looks at ${who}`}, on average`;
    const seen = countsOf(head)[tokens[0]];
    const notes = isWeights(meaning) ? [] : [`Shown: ${meaning.title}.`];
    if (tokens.length > 1) {
      const few = tokens.slice(0, 6).map(nameAt).join(", ");
      notes.push(`Chosen: ${few}${tokens.length > 6 ? ", …" : ""}. Shaded: more weight than uniform attention would give, on average.`);
    } else if (!out) notes.push("Shaded: queries that give it more weight than uniform attention would.");
    else if (seen === 0) notes.push("The mask leaves this query no key.");
    else notes.push(`Shaded: keys with more weight than uniform attention would give, 1/${seen} = ${percent(1 / seen)}.`);
    if (preview) notes.unshift(`${[...chosen].slice(0, 3).map((index) => `“${nameOf(names[page.view.view === "out" ? 0 : 1], index)}”`).join(", ")}${chosen.size > 3 ? ", …" : ""} ${chosen.size > 1 ? "stay" : "stays"} chosen.`);
    if (withArcs(page.view) && shading.strongest.length) {
      notes.push(`Arcs, the strongest ${shading.strongest.length}: ${
        shading.strongest.map(([weight, i, j]) => `${pairName(names, i, j)} ${percent(weight)}`).join(", ")}.`);
    }
    if (out && tokens.length === 1 && layer.begins.length > 1) {
      const step = layer.begins.filter((first) => first <= tokens[0]).length - 1;
      notes.push(`The model read ${who} in step ${step} of ${layer.begins.length - 1}${step ? "" : ", the prompt"}.`);
    }
    if (layer.answer ?? null) notes.push(`The answer begins at token ${layer.answer}; before it is the prompt.`);
    page.find("prose-note").textContent = notes.join(" ");
    if (!preview) page.find("prose-said").textContent = chosen.size > 1 ? `${chosen.size} tokens chosen` : "";
  }

  /**
   * Points at a token: at once its pair with the chosen token is shown, and where the pointer rests the weights of the token
   * itself; from then on those of each token that the pointer comes to. Null: at none.
   *
   * @param {Listing} listing
   * @param {number | null} index
   * @param {boolean} [rests]
   */
  point(listing, index, rests = true) {
    clearTimeout(this.resting);
    const { page } = this;
    if (index === null) return page.hover(null);
    const own = () => {
      const view = this.viewFrom(listing);
      const [other] = lookOf(page.now.head, view, index).ranked;
      page.hover(view === "out" ? { i: index, j: other ?? null } : { i: other ?? null, j: index }, view);
    };
    const chosen = listing === this.holding && this.chosen.has(index);
    if (this.previewing && !chosen) return own();
    page.hover(this.previewed(listing, index));
    if (rests && !chosen) this.resting = setTimeout(own, REST);
  }

  /**
   * The direction in which a token of a listing is looked from.
   *
   * @param {Listing | null} listing
   * @returns {Direction}
   */
  viewFrom(listing) {
    const side = listing?.side ?? "both";
    return side === "both" ? this.page.view.view : side === "query" ? "out" : "in";
  }

  /**
   * The pair of a token under the pointer with the chosen token, where the chosen token is on the other side.
   *
   * @param {Listing} given
   * @param {number} index
   * @returns {Pair}
   */
  previewed({ side }, index) {
    const { view, look } = this.page.now;
    const out = view === "out";
    const other = side === "both" || (side === "query") !== out;
    if (!other) return out ? { i: index, j: null } : { i: null, j: index };
    return out ? { i: look.token, j: index } : { i: index, j: look.token };
  }

  /** @param {Pair | null} pair */
  hover(pair) {
    for (const span of this.passing) span.classList.remove("passing");
    this.passing = [];
    if (pair === null) return;
    for (const { side, prose } of this.listings) {
      const at = side === "query" ? [pair.i] : side === "key" ? [pair.j] : [pair.i, pair.j];
      for (const index of at) if (index !== null && prose.spans[index]) this.passing.push(prose.spans[index]);
    }
    for (const span of this.passing) span.classList.add("passing");
    const { look } = this.page.current;
    this.previewing = look !== this.page.now.look;
  }

  /** @param {Shown} shown */
  linger({ look }) {
    const { now } = this.page;
    const [view, tokens] = look === now.look ? [look.view, [...this.chosen]] : [look.view, [look.token]];
    const same = this.shading?.view === view && this.shading.tokens.join() === tokens.join();
    if (!same) this.show(view, tokens, look, look !== now.look);
  }
}
