// ---- The state, and the one way it changes: choose() some of it, then everything is painted.

const state = { layer: 0, head: 0, view: "out", token: null, pair: null, scale: "log" };
let current = null; // what is on the page: the opened head and the look of the chosen token
let latest = 0;

const textLength = () => {
  const layer = meta.layers[state.layer];
  return state.view === "out" ? layer.queries : layer.keys;
};

/** A number of a link, or null where it is none that exists. */
function numberIn(text, count) {
  const value = /^\d+$/.test(text ?? "") ? Number(text) : NaN;
  return value < count ? value : null;
}

/** Takes what the address names, such as `#layer=2&head=9&token=80&view=in&scale=linear`. */
function readAddress() {
  const parts = new URLSearchParams(window.location.hash.slice(1));
  state.layer = numberIn(parts.get("layer"), meta.layers.length) ?? 0;
  state.head = numberIn(parts.get("head"), meta.layers[state.layer].heads.length) ?? 0;
  state.view = parts.get("view") === "in" ? "in" : "out";
  state.scale = parts.get("scale") === "linear" ? "linear" : "log";
  state.token = numberIn(parts.get("token"), textLength());
  state.pair = null;
}

function writeAddress() {
  const parts = new URLSearchParams({ layer: state.layer, head: state.head, token: state.token });
  if (state.view === "in") parts.set("view", "in");
  if (state.scale === "linear") parts.set("scale", "linear");
  try {
    window.history.replaceState(null, "", `#${parts}`);
  } catch {
    // A page inside another document may not change its address: it works without.
  }
}

/** Changes some of the state, and the page with it. */
function choose(change) {
  const before = meta.layers[state.layer];
  const { view } = state;
  Object.assign(state, change);
  const after = meta.layers[state.layer];
  const sameTexts = before.queryText === after.queryText && before.keyText === after.keyText;
  const turned = state.view !== view;
  if (change.layer !== undefined || (turned && change.pair === undefined)) state.pair = null;
  const otherText = turned && !oneText(after); // its tokens are counted anew
  if (!sameTexts || (otherText && change.token === undefined)) state.token = null;
  refresh();
}

async function refresh() {
  const turn = ++latest;
  if (state.token === null || state.token >= textLength()) state.token = Math.floor(textLength() / 2);
  writeAddress();
  markChosenHead(state.layer, state.head);
  for (const name of ["scale", "view"]) {
    document.querySelector(`input[name=${name}][value=${state[name]}]`).checked = true;
  }
  const head = await openHead(state.layer, state.head);
  if (turn !== latest) return;
  const { layer } = head;
  countsOf(head);
  const look = lookOf(head, state.view, state.token);
  const pair = state.pair ?? look.ranked[0] ?? null;
  current = {
    head, look, pair,
    table: themeColours().table,
    scale: state.scale,
    floor: floorOf(head.mostKeys),
  };
  const where = `layer ${layerLabels[state.layer]}, head ${state.head}`;
  byId("where").textContent = `${layer.name} · ${layer.kind} attention · ${where}`;
  byId("map-title").textContent = `The weights of ${where}`;
  buildProse(layer, choose);
  paintProse(current);
  paintDetail(current, choose);
  paintLegend(current);
  document.documentElement.dataset.shown =
    [state.layer, state.head, state.view, state.token, pair ?? "none"].join("/");
  await paintMap(current, `${state.layer}/${state.head}`);
}

/** After a change of size or theme: the same state, drawn anew. */
let resizing = 0;
function redrawSoon() {
  window.clearTimeout(resizing);
  resizing = window.setTimeout(refresh, 120);
}

/**
 * For tests and for the console; nothing on the page depends on it. All of it only reads.
 * `state()`: a copy of what is chosen. `weights(layer, head, query)`: the promise of one row, as an
 * array of numbers. `operands(layer, head)`: the promise of its query and its key. `why(layer, head, query, key)`: the promise of the steps of one weight, as [name, formula, number].
 * `look()`: the weights of the chosen token as shown. `map()`: the map's geometry
 * and its pooled weights.
 * On the root element, `data-overview` and `data-map` turn "drawn", `data-shown` names what the
 * panes show as layer/head/view/token/pair, and `data-problem` is "yes" after an error.
 */
function offerHooks() {
  window.clearhead = Object.freeze({
    state: () => ({ ...state }),
    weights: async (layerIndex, headIndex, query) =>
      Array.from(lookOf(await openHead(layerIndex, headIndex), "out", query).weights),
    operands: async (layerIndex, headIndex) => {
      const { query, key } = await openHead(layerIndex, headIndex);
      return [Array.from(query), Array.from(key)];
    },
    why: async (layerIndex, headIndex, i, j) =>
      [...whyOf(await openHead(layerIndex, headIndex), i).values()].filter((step) => step.made)
        .map((step) => [step.name, step.formula, numberAt(step, j).value]),
    look: () => Array.from(current.look.weights),
    map: () => ({ ...mapView.layout, pool: Array.from(mapView.pool) }),
  });
}

function begin() {
  if (typeof DecompressionStream === "undefined") {
    window.clearheadProblem("this browser cannot unpack its data (no DecompressionStream).");
    return;
  }
  byId("page").hidden = false;
  offerHooks();
  buildOverview(choose);
  paintOverview();
  for (const input of document.querySelectorAll("fieldset.choice input")) {
    input.addEventListener("change", () => choose({ [input.name]: input.value }));
  }
  listenToMap(() => current, choose);
  window.addEventListener("hashchange", () => {
    readAddress();
    refresh();
  });
  window.addEventListener("resize", redrawSoon);
  darkTheme.addEventListener("change", () => {
    paintOverview();
    refresh();
  });
  readAddress();
  refresh();
}

begin();
