// ---- The page of a file: its one report, and its address.

import { followAddress, writeAddress } from "../../base/front/address.js";
import { elementIn } from "../../base/front/dom.js";
import { ComparePane } from "./compare.js";
import { embeddedSource, Run } from "./data.js";
import { MapPane } from "./map.js";
import { mount, templateOf } from "./mount.js";
import { TILE } from "./picture.js";
import { TextPane } from "./text.js";
import { slices, tileOf } from "./tiles.js";
import { lookOf } from "./weights.js";
import { numberAt, whyOf } from "./why.js";

/**
 * @import { Page } from "./mount.js"
 * @import { Direction } from "./types.d.ts"
 */

/**
 * For tests and for the console; nothing on the page depends on it, and it changes nothing.
 * `state()`: a copy of the choices. `weights(layer, head, token, view)`: the promise of one row, or with view "in" one
 * column, as an array of numbers. `tile(layer, head, query, key)`: the promise of 256 × 256 weights. `operands(layer, head)`: the promise of its query and its key. `why(layer, head, query, key)`: the
 * promise of the steps of one weight, as [name, formula, number]. `look()`: the weights of the chosen token as shown.
 * `text()`: the numbers of the text's shading: the mean weight of each token, what uniform attention gives, the strongest pairs.
 * `map()`: the map's geometry. `cells()`: its pooled weights, where all of it is in sight. `compare()`: the divergences of the heads that are compared.
 * On the report's element, `data-overview` and `data-map` turn "drawn", `data-shown` names what the
 * panes show as layer/head/view/token/pair; `data-problem` of the root element is "yes" after an error.
 *
 * @param {Page} page
 */
function offerHooks(page) {
  /**
   * @param {number} layer
   * @param {number} head
   */
  const open = (layer, head) => page.run.open(layer, head);
  /**
   * @template Kind
   * @param {new (page: Page) => Kind} kind
   */
  const pane = (kind) => {
    for (const one of page.panes) if (one instanceof kind) return one;
    throw new Error(`there is no ${kind.name}`);
  };
  window.clearhead = Object.freeze({
    state: () => {
      const { layer, head, view, token, pair, scale } = page.view;
      return { layer, head, view, token, pair, scale };
    },
    /**
     * @param {number} layer
     * @param {number} head
     * @param {number} token
     * @param {Direction} [view]
     */
    weights: async (layer, head, token, view = "out") => Array.from(lookOf(await open(layer, head), view, token).weights),
    /**
     * @param {number} layer
     * @param {number} head
     * @param {number} i
     * @param {number} j
     */
    tile: async (layer, head, i, j) => tileOf(await open(layer, head),
      { i, j, rows: TILE, columns: TILE, perRow: 1, perColumn: 1, mean: false, relative: false },
      slices(Infinity, () => true)),
    /**
     * @param {number} layer
     * @param {number} head
     */
    operands: async (layer, head) => {
      const { query, key } = await open(layer, head);
      return [Array.from(query), Array.from(key)];
    },
    /**
     * @param {number} layer
     * @param {number} head
     * @param {number} i
     * @param {number} j
     */
    why: async (layer, head, i, j) =>
      [...whyOf(await open(layer, head), i, page.run).values()].flatMap(({ name, formula, found }) =>
        (found ? [[name, formula, numberAt(found, j).value]] : [])),
    look: () => Array.from(page.now.look.weights),
    text: () => {
      const { shading } = pane(TextPane);
      if (!shading) throw new Error("the text is not shaded yet");
      const { weights, fair, strongest, tokens } = shading;
      return { weights: Array.from(weights), fair: Array.from(fair), strongest, tokens };
    },
    map: () => pane(MapPane).geometry,
    cells: () => pane(MapPane).cells,
    compare: () => pane(ComparePane).numbers,
  });
}

function begin() {
  const host = elementIn(document, "clearhead");
  host.hidden = false;
  const page = mount(host, new Run(embeddedSource(document)), templateOf(MARKUP));
  offerHooks(page);
  page.find("print").hidden = window.parent !== window; // a browser does not print from a sandboxed frame
  page.onaddress = writeAddress;
  followAddress((address) => address !== page.view.address && page.go(address));
  // A key pressed where nothing has the focus is the report's.
  document.addEventListener("keydown", (event) => {
    const { main } = page;
    if (event.target !== document.body || main.inert) return;
    const taken = !main.dispatchEvent(new KeyboardEvent("keydown", event));
    if (taken) event.preventDefault();
  });
  page.go(window.location.hash);
}

begin();
