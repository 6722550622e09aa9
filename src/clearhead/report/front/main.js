// ---- The page of a file: its one report, and its address.

import { ComparePane } from "./compare.js";
import { embeddedSource, Run } from "./data.js";
import { MapPane } from "./map.js";
import { mount } from "./mount.js";
import { TILE } from "./picture.js";
import { TextPane } from "./text.js";
import { slices, tileOf } from "./tiles.js";
import { lookOf } from "./weights.js";
import { numberAt, whyOf } from "./why.js";

/**
 * For tests and for the console; nothing on the page depends on it. All of it only reads.
 * `state()`: a copy of what is chosen. `weights(layer, head, token, view)`: the promise of one row, or with view "in" one
 * column, as an array of numbers. `tile(layer, head, query, key)`: the promise of 256 × 256 weights. `operands(layer, head)`: the promise of its query and its key. `why(layer, head, query, key)`: the
 * promise of the steps of one weight, as [name, formula, number]. `look()`: the weights of the chosen token as shown.
 * `text()`: what the text is shaded by: the mean weight of each token, what uniform attention gives, the strongest pairs.
 * `map()`: the map's geometry. `cells()`: its pooled weights, where all of it is in sight. `compare()`: the divergences of the heads that are compared.
 * On the report's element, `data-overview` and `data-map` turn "drawn", `data-shown` names what the
 * panes show as layer/head/view/token/pair; `data-problem` of the root element is "yes" after an error.
 */
function offerHooks(page) {
  const open = (layer, head) => page.run.open(layer, head);
  const pane = (kind) => page.panes.find((one) => one instanceof kind);
  window.clearhead = Object.freeze({
    state: () => {
      const { layer, head, view, token, pair, scale } = page.view;
      return { layer, head, view, token, pair, scale };
    },
    weights: async (layer, head, token, view = "out") => Array.from(lookOf(await open(layer, head), view, token).weights),
    tile: async (layer, head, i, j) => tileOf(await open(layer, head),
      { i, j, rows: TILE, columns: TILE, perRow: 1, perColumn: 1 }, slices(Infinity)),
    operands: async (layer, head) => {
      const { query, key } = await open(layer, head);
      return [Array.from(query), Array.from(key)];
    },
    why: async (layer, head, i, j) =>
      [...whyOf(await open(layer, head), i, page.run).values()].filter((step) => step.made)
        .map((step) => [step.name, step.formula, numberAt(step, j).value]),
    look: () => Array.from(page.shown.look.weights),
    text: () => {
      const { weights, fair, strongest, tokens } = pane(TextPane).shading;
      return { weights: Array.from(weights), fair: Array.from(fair), strongest, tokens };
    },
    map: () => pane(MapPane).geometry,
    cells: () => pane(MapPane).cells,
    compare: () => pane(ComparePane).numbers,
  });
}

function begin() {
  const host = document.getElementById("clearhead");
  host.hidden = false;
  const page = mount(host, new Run(embeddedSource(document)), document.getElementById("clearhead-page"));
  offerHooks(page);
  page.onaddress = (address, step) => {
    try {
      // a link and Back restore what was chosen
      if (address !== window.location.hash) window.history[step ? "pushState" : "replaceState"](null, "", address);
    } catch {
      // A page inside another document may not change its address: it works without.
    }
  };
  for (const event of ["popstate", "hashchange"]) {
    window.addEventListener(event, () => window.location.hash !== page.view.address && page.go(window.location.hash));
  }
  // A key pressed where nothing has the focus is the report's.
  document.addEventListener("keydown", (event) => {
    const main = page.root.querySelector("main");
    if (event.target !== document.body || main.inert) return;
    const taken = !main.dispatchEvent(new KeyboardEvent("keydown", event));
    if (taken) event.preventDefault();
  });
  page.go(window.location.hash);
}

begin();
