// ---- All heads, small: one button each, by layer or in the order of a statistic.

const tiles = [];

/** Layers alike but for their numbers stand under one heading: "encoder.layer.∗.attention · self". */
const groupOf = (layer) => `${layer.name.replace(/\d+/g, "∗")} · ${layer.kind}`;
const groups = Array.from(new Set(meta.layers.map(groupOf)));

/**
 * A short name for each layer: the numbers in its own, after a letter where there are several
 * groups, and with #2 for the second call under the same name.
 */
const layerLabels = [];
meta.layers.forEach((layer, index) => {
  const at = groups.indexOf(groupOf(layer));
  const letter = groups.length === 1 ? "" : at < 26 ? String.fromCharCode(65 + at) : `${at + 1}:`;
  const numbers = (layer.name.match(/\d+/g) || (letter ? [] : [index])).join(".");
  const same = meta.layers.slice(0, index)
    .filter((other) => other.name === layer.name && other.kind === layer.kind);
  layerLabels.push(`${letter}${numbers}${same.length ? `#${same.length + 1}` : ""}`);
});

function describeTile(layer, layerIndex, headIndex) {
  const { mean } = layer.heads[headIndex];
  const place = `layer ${layerLabels[layerIndex]}, head ${headIndex}`;
  const words = [`${place}, ${layer.name}, ${layer.kind} attention`];
  if (mean.entropy !== null) words.push(`mean entropy ${mean.entropy.toFixed(2)} nats`);
  if (mean.sink !== null) {
    words.push(`most received key ${nameOf(layer.keyText, mean.sinkKey)} with ${percent(mean.sink)}`);
  }
  if (mean.distance !== null) words.push(`mean distance ${mean.distance.toFixed(1)}`);
  return words.join(", ");
}

function buildOverview(choose) {
  meta.layers.forEach((layer, layerIndex) => layer.heads.forEach((_, headIndex) => {
    const button = make("button", "head");
    button.type = "button";
    button.tabIndex = -1;
    const words = describeTile(layer, layerIndex, headIndex);
    button.setAttribute("aria-label", words);
    button.title = words;
    const canvas = make("canvas");
    canvas.width = layer.thumbnail.columns;
    canvas.height = layer.thumbnail.rows;
    const caption = make("span", "caption");
    button.append(canvas, caption);
    button.addEventListener("click", () => choose({ layer: layerIndex, head: headIndex }));
    tiles.push({ button, canvas, caption, layer, layerIndex, headIndex });
  }));
  byId("overview-title").textContent = `All ${plural(tiles.length, "head")}`;
  byId("order").addEventListener("change", arrangeOverview);
  byId("heads").addEventListener("keydown", moveInOverview);
  arrangeOverview();
}

/** Puts the tiles in the order asked for. */
function arrangeOverview() {
  const box = byId("heads");
  const order = byId("order").value;
  box.replaceChildren();
  box.classList.toggle("ranked", order !== "layer");
  if (order === "layer") arrangeByLayer(box);
  else arrangeByStatistic(box, order);
  if (current) markChosenHead(state.layer, state.head);
  box.scrollTop = 0; // who sorts wants to see the first
  byId("overview-note").textContent =
    (order === "layer" ? "One row a layer. " : "") +
    "Each small map shows the largest weight in each of its cells, in log colour. " +
    "Arrow keys move, Enter opens.";
}

function arrangeByLayer(box) {
  const rows = meta.layers.map((_, layerIndex) => {
    const row = make("div", "row");
    row.append(make("span", "number", layerLabels[layerIndex]));
    return row;
  });
  for (const tile of tiles) {
    tile.caption.textContent = "";
    rows[tile.layerIndex].append(tile.button);
  }
  for (const group of groups) {
    box.append(make("h3", "", group), ...rows.filter((_, index) => groupOf(meta.layers[index]) === group));
  }
}

function arrangeByStatistic(box, statistic) {
  const upward = statistic === "entropy" ? 1 : -1;
  const valueOf = (tile) => tile.layer.heads[tile.headIndex].mean[statistic];
  const last = (value) => (value === null ? Infinity : upward * value);
  const sorted = tiles.slice().sort((a, b) => (last(valueOf(a)) - last(valueOf(b))) || 0);
  for (const tile of sorted) {
    const value = valueOf(tile);
    const shown = value === null ? "–" : statistic === "sink" ? percent(value) : value.toFixed(1);
    tile.caption.textContent = `${layerLabels[tile.layerIndex]}·${tile.headIndex}  ${shown}`;
    box.append(tile.button);
  }
}

/** Arrow keys: sideways to the next head, up and down to the nearest in the next row. */
function moveInOverview(event) {
  const buttons = Array.from(byId("heads").querySelectorAll("button"));
  const from = buttons.indexOf(document.activeElement);
  const to = from < 0 ? -1 : stepTo(event.key, from, buttons);
  if (to < 0) return;
  event.preventDefault();
  for (const button of buttons) button.tabIndex = -1;
  buttons[to].tabIndex = 0;
  buttons[to].focus();
}

/** The index that an arrow key leads to among laid-out elements, or -1. */
function stepTo(key, from, elements) {
  const last = elements.length - 1;
  const forward = getComputedStyle(elements[from].parentElement).direction === "rtl" ? -1 : 1;
  if (key === "ArrowRight") return Math.min(last, Math.max(0, from + forward));
  if (key === "ArrowLeft") return Math.min(last, Math.max(0, from - forward));
  if (key === "Home") return 0;
  if (key === "End") return last;
  if (key !== "ArrowUp" && key !== "ArrowDown") return -1;
  const way = key === "ArrowDown" ? 1 : -1;
  const here = elements[from].getBoundingClientRect();
  const aside = (box) => Math.abs(box.left + box.width / 2 - here.left - here.width / 2);
  let best = from;
  let least = Infinity;
  let row = null;
  for (let at = from + way; at >= 0 && at <= last; at += way) {
    const box = elements[at].getBoundingClientRect();
    if ((box.top - here.top) * way < 4) continue; // still the same row
    if (row !== null && Math.abs(box.top - row) > 4) break; // past the next row
    row = box.top;
    if (aside(box) < least) {
      least = aside(box);
      best = at;
    }
  }
  return best;
}

function markChosenHead(layerIndex, headIndex) {
  for (const tile of tiles) {
    const chosen = tile.layerIndex === layerIndex && tile.headIndex === headIndex;
    tile.button.tabIndex = chosen ? 0 : -1;
    if (chosen) {
      if (!tile.button.hasAttribute("aria-current")) revealIn(byId("heads"), tile.button);
      tile.button.setAttribute("aria-current", "true");
    } else tile.button.removeAttribute("aria-current");
  }
}

/** Draws every small map; again when the theme changes. */
async function paintOverview() {
  const { table } = themeColours();
  for (const layer of meta.layers) {
    const { block: number, rows, columns, decades } = layer.thumbnail;
    const codes = await block(number);
    const floor = floorOf(layer.keys);
    const steps = Uint8Array.from({ length: 256 }, (_, code) =>
      (code === 0 ? 0 : stepOf(10 ** (decades * ((code - 1) / 254 - 1)), "log", floor)));
    for (const tile of tiles.filter((each) => each.layer === layer)) {
      const image = new ImageData(columns, rows);
      const base = tile.headIndex * rows * columns;
      for (let cell = 0; cell < rows * columns; cell++) {
        const step = steps[codes[base + cell]];
        for (let c = 0; c < 3; c++) image.data[4 * cell + c] = table[3 * step + c];
        image.data[4 * cell + 3] = 255;
      }
      tile.canvas.getContext("2d").putImageData(image, 0, 0);
    }
  }
  document.documentElement.dataset.overview = "drawn";
}
