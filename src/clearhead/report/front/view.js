// ---- What is chosen on the page, and the address that holds it: a link and Back restore all of it.

import { inText, placesAcross } from "./difference.js";
import { isSecond } from "./names.js";

export const SCALES = ["uniform", "log", "linear"];

/** A number of a link, or null where it is none that exists. */
export function numberIn(text, count) {
  const value = /^\d+$/.test(text ?? "") ? Number(text) : NaN;
  return value < count ? value : null;
}

/**
 * `layer` and `head`; `view`, "out": what a query looks at, or "in": what looks at a key; `token`, that query or key;
 * `pair`, the other token, or null for the strongest; `scale`, of the colours. `more`: what panes add, each name with the
 * function that reads it from the address.
 */
export class View {
  constructor(run, more) {
    this.run = run;
    this.more = Object.entries(more);
    this.read("");
  }

  /** Takes what the address names, such as `layer=2&head=9&token=80&pair=3&view=in&scale=linear`. */
  read(address) {
    const parts = new URLSearchParams(address.replace(/^#/, ""));
    const { layers, first } = this.run;
    this.layer = numberIn(parts.get("layer"), layers.length) ?? first.layer;
    const named = parts.has("layer") || parts.has("head");
    this.head = numberIn(parts.get("head"), layers[this.layer].heads.length) ?? (named ? 0 : first.head);
    this.view = parts.get("view") === "in" ? "in" : "out";
    this.scale = SCALES.includes(parts.get("scale")) ? parts.get("scale") : SCALES[0];
    const [own, other] = this.lengths;
    this.token = numberIn(parts.get("token"), own);
    this.pair = numberIn(parts.get("pair"), other);
    for (const [name, readOne] of this.more) this[name] = readOne(parts.get(name), this.run);
  }

  get address() {
    const parts = new URLSearchParams({ layer: this.layer, head: this.head, token: this.token });
    if (this.pair !== null) parts.set("pair", this.pair);
    if (this.view === "in") parts.set("view", "in");
    if (this.scale !== SCALES[0]) parts.set("scale", this.scale);
    for (const [name] of this.more) if (this[name] !== null) parts.set(name, this[name]);
    return `#${parts}`;
  }

  /** How many tokens there are on the side of `token`, and on the other. */
  get lengths() {
    const { queries, keys } = this.run.layers[this.layer];
    return this.view === "out" ? [queries, keys] : [keys, queries];
  }

  /** Changes some of it. What does not fit what is new is forgotten. */
  change(change) {
    const before = this.run.layers[this.layer];
    const { view, token } = this;
    Object.assign(this, change);
    const after = this.run.layers[this.layer];
    if (change.layer !== undefined && change.head === undefined) {
      this.head = Math.min(this.head, after.heads.length - 1);
    }
    const sameTexts = before.queryText === after.queryText && before.keyText === after.keyText;
    const turned = this.view !== view;
    const [own, other] = this.lengths;
    if (!sameTexts && change.zoom === undefined) this.zoom = null;
    if (change.pair === undefined && (turned || !sameTexts || this.pair >= other)) this.pair = null;
    const otherText = turned && !oneText(after); // its tokens are counted anew
    if (change.token === undefined && (!sameTexts || otherText)) {
      this.token = turned ? null : tokenBeside(this.run, before, after, token);
    }
    if (this.token !== null && this.token >= own) this.token = null;
    if (change.tokens === undefined && (turned || this.token !== token)) this.tokens = null; // another is chosen alone
  }
}

/** Does one text look at itself, so that one reading serves both sides? */
export const oneText = (layer) => layer.kind === "self" && layer.queryText === layer.keyText;

/** The same token in the text of the other recording; null where it has not that, and in texts that do not correspond. */
function tokenBeside(run, before, after, token) {
  const corresponds = token !== null && isSecond(before) !== isSecond(after) && oneText(before) && oneText(after);
  const at = corresponds ? inText(placesAcross(run, before.queryText, after.queryText), token) : -1;
  return at < 0 ? null : at;
}

/** The change of a view that makes query i and key j the pair looked at. */
export const pairOf = (view, i, j) => (view === "out" ? { token: i, pair: j } : { token: j, pair: i });
