// ---- The choices on the page, and the address that holds them: a link and Back restore all of them.

import { addressFrom, numberIn, partsOf } from "../../base/front/address.js";
import { inText, placesAcross } from "./difference.js";
import { isSecond } from "./names.js";

/** @import { Change, Direction, Heads, LayerOfHeads, More, Reader, Readers } from "./types.d.ts" */

export const SCALES = ["uniform", "log", "linear"];

/**
 * `layer` and `head`; `view`, "out": what a query looks at, or "in": what looks at a key; `token`, that query or key;
 * `pair`, the other token, or null for the strongest; `scale`, of the colours. `more`: what panes add, each name with the
 * function that reads it from the address.
 */
export class View {
  /**
   * @param {Heads} run
   * @param {Readers} more
   */
  constructor(run, more) {
    this.run = run;
    this.more = /** @type {[More, Reader][]} */ (Object.entries(more));
    this.layer = 0;
    this.head = 0;
    /** @type {Direction} */
    this.view = "out";
    this.scale = SCALES[0];
    /** @type {number | null} */
    this.token = null;
    /** @type {number | null} */
    this.pair = null;
    const none = /** @type {string | null} */ (null); // entries of panes that the address does not name
    this.by = this.against = this.show = this.only = this.pins = this.tokens = this.arcs = this.spelling = none;
    this.zoom = this.pool = this.a = this.b = this.lines = this.meaning = this.colours = this.all = none;
    this.read("");
  }

  /**
   * Reads the choices of the address, such as `layer=2&head=9&token=80&pair=3&view=in&scale=linear`.
   *
   * @param {string} address
   */
  read(address) {
    const parts = partsOf(address);
    const { layers, first } = this.run;
    this.layer = numberIn(parts.get("layer"), layers.length) ?? first.layer;
    const named = parts.has("layer") || parts.has("head");
    this.head = numberIn(parts.get("head"), layers[this.layer].heads.length) ?? (named ? 0 : first.head);
    this.view = parts.get("view") === "in" ? "in" : "out";
    this.scale = SCALES.find((scale) => scale === parts.get("scale")) ?? SCALES[0];
    const [own, other] = this.lengths;
    this.token = numberIn(parts.get("token"), own);
    this.pair = numberIn(parts.get("pair"), other);
    for (const [name, readOne] of this.more) this[name] = readOne(parts.get(name), this.run, parts);
  }

  get address() {
    return addressFrom([
      ["layer", this.layer], ["head", this.head], ["token", this.token], ["pair", this.pair],
      ["view", this.view === "in" ? "in" : null], ["scale", this.scale === SCALES[0] ? null : this.scale],
      ...this.added,
    ]);
  }

  /** @returns {[string, string | null][]} */
  get added() {
    return this.more.map(([name]) => [name, this[name]]);
  }

  /** The token that is chosen: the page chooses one where the address names none. */
  get own() {
    if (this.token === null) throw new Error("no token is chosen yet");
    return this.token;
  }

  /** The number of tokens on the side of `token`, and on the other side. */
  get lengths() {
    const { queries, keys } = this.run.layers[this.layer];
    return this.view === "out" ? [queries, keys] : [keys, queries];
  }

  /**
   * Changes some choices. Other choices that do not fit the new ones are dropped.
   *
   * @param {Change} change
   */
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
    if (change.pair === undefined && (turned || !sameTexts || (this.pair ?? -1) >= other)) this.pair = null;
    const otherText = turned && !oneText(after); // its tokens are counted anew
    if (change.token === undefined && (!sameTexts || otherText)) {
      this.token = turned ? null : tokenBeside(this.run, before, after, token);
    }
    if (this.token !== null && this.token >= own) this.token = null;
    if (change.tokens === undefined && (turned || this.token !== token)) this.tokens = null; // another is chosen alone
  }
}

/**
 * Whether one text looks at itself, so that both sides have the same tokens.
 *
 * @param {LayerOfHeads} layer
 */
export const oneText = (layer) => layer.kind === "self" && layer.queryText === layer.keyText;

/**
 * The same token in the text of the other recording; null where it is missing, or the texts do not correspond.
 *
 * @param {Heads} run
 * @param {LayerOfHeads} before
 * @param {LayerOfHeads} after
 * @param {number | null} token
 */
function tokenBeside(run, before, after, token) {
  const corresponds = isSecond(before) !== isSecond(after) && oneText(before) && oneText(after);
  if (token === null || !corresponds) return null;
  const at = inText(placesAcross(run, before.queryText, after.queryText), token);
  return at < 0 ? null : at;
}

/**
 * The change of a view that makes query i and key j the current pair.
 *
 * @param {Direction} view
 * @param {number} i
 * @param {number} j
 * @returns {{ token: number, pair: number }}
 */
export const pairOf = (view, i, j) => (view === "out" ? { token: i, pair: j } : { token: j, pair: i });
