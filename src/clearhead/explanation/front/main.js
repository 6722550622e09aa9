// ---- The page: it is painted whenever something is chosen, and opens what its address names.

import { followAddress } from "../../base/front/address.js";
import { callsIn } from "../../base/front/language.js";
import { operations } from "../../base/front/operations.js";
import { plainText } from "../../base/front/terms.js";
import { cards, chosenIndex, makeCards, showCards, visibleViews } from "./cards.js";
import { addressOf, choice, openAddress, paintWith, refresh } from "./choice.js";
import { followPrinting, makeControls, paintControls } from "./controls.js";
import { byId } from "./data.js";
import { listen } from "./keys.js";
import { allNumbers, change, obstacle, stepOf, steps } from "./steps.js";
import { sentenceOf, showChosen } from "./written.js";

/** @import { Tree } from "../../base/front/types.d.ts" */

/** In each table one cell is reached by Tab: the one that the choice names. */
function placeTabs() {
  for (const view of visibleViews()) {
    const flat = view.cells.flat();
    for (const cell of flat) cell.tabIndex = -1;
    (view.cellAt(chosenIndex(view.step)) ?? flat[0]).tabIndex = 0;
  }
}

function paint() {
  showCards();
  paintControls();
  placeTabs();
  showChosen();
  for (const card of cards) card.link.href = addressOf({ step: card.steps[0].name, at: choice.at });
  document.documentElement.dataset.shown = choice.step;
}

/**
 * For tests and for the console; all of it only reads. `numbers(name)`: the numbers of a step as the page has them.
 * `computed(name)`: the same, computed from the steps before. `sentence(name, index)`: one number written out.
 * `obstacle`: why the page can't compute. `unknown(tree)`: the operations of a tree that the page lacks.
 */
function offerHooks() {
  /** @param {Float64Array} all */
  const plain = (all) => Array.from(all, (x) => (Number.isFinite(x) ? x : String(x)));
  window.clearhead = Object.freeze({
    obstacle,
    names: () => [...steps.keys()],
    /** @param {string} name */
    sizes: (name) => [...stepOf(name).sizes],
    /** @param {string} name */
    numbers: (name) => plain(stepOf(name).numbers),
    /** @param {string} name */
    computed: (name) => plain(allNumbers(stepOf(name).made ?? stepOf(name).node)),
    /**
     * @param {string} name
     * @param {number[]} index
     */
    sentence: (name, index) => plainText(sentenceOf(stepOf(name), index)),
    /** @param {Tree} tree */
    unknown: (tree) => callsIn(tree).filter((name) => !Object.hasOwn(operations, name)),
    change: () => ({ scale: change.scale, temperature: change.temperature }),
  });
}

function main() {
  byId("page").hidden = false;
  document.documentElement.dataset.view = "one";
  paintWith(paint);
  makeCards();
  makeControls();
  listen();
  followPrinting();
  followAddress(() => {
    openAddress();
    refresh();
  });
  offerHooks();
  refresh();
}

main();
