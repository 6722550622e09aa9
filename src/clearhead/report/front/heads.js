// ---- All heads, small: one button each, by layer or in the order of a statistic.

/** Layers alike but for their numbers stand under one heading: "encoder.layer.∗.attention · self". */
const groupOf = (layer) => `${layer.name.replace(/\d+/g, "∗")} · ${layer.kind}`;

/**
 * A short name for each layer: the numbers in its own, after a letter where there are several
 * groups, and with #2 for the second call under the same name.
 */
function labelsOf(layers) {
  const groups = Array.from(new Set(layers.map(groupOf)));
  return layers.map((layer, index) => {
    const at = groups.indexOf(groupOf(layer));
    const letter = groups.length === 1 ? "" : at < 26 ? String.fromCharCode(65 + at) : `${at + 1}:`;
    const numbers = (layer.name.match(/\d+/g) || (letter ? [] : [index])).join(".");
    const same = layers.slice(0, index).filter((other) => other.name === layer.name && other.kind === layer.kind);
    return `${letter}${numbers}${same.length ? `#${same.length + 1}` : ""}`;
  });
}

class HeadsPane {
  constructor(page) {
    this.page = page;
    this.box = page.find("heads");
    this.order = page.find("order");
    this.tiles = [];
    page.run.layers.forEach((layer, layerIndex) => layer.heads.forEach((_, headIndex) => {
      this.tiles.push(this.tile(layer, layerIndex, headIndex));
    }));
    page.find("overview-title").textContent = `All ${plural(this.tiles.length, "head")}`;
    this.order.addEventListener("change", () => this.arrange());
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.arrange();
  }

  tile(layer, layerIndex, headIndex) {
    const button = make("button", "head");
    button.type = "button";
    button.tabIndex = -1;
    const words = this.describe(layer, layerIndex, headIndex);
    button.setAttribute("aria-label", words);
    button.title = words;
    const canvas = make("canvas");
    canvas.width = layer.thumbnail.columns;
    canvas.height = layer.thumbnail.rows;
    const caption = make("span", "caption");
    button.append(canvas, caption);
    button.addEventListener("click", () => this.page.choose({ layer: layerIndex, head: headIndex }));
    return { button, canvas, caption, layer, layerIndex, headIndex };
  }

  describe(layer, layerIndex, headIndex) {
    const { mean } = layer.heads[headIndex];
    const words = [`layer ${this.page.labels[layerIndex]}, head ${headIndex}, ${layer.name}, ${layer.kind} attention`];
    if (mean.entropy !== null) words.push(`mean entropy ${mean.entropy.toFixed(2)} nats`);
    if (mean.sink !== null) {
      const name = nameOf(this.page.texts[layer.keyText], mean.sinkKey);
      words.push(`most received key ${name} with ${percent(mean.sink)}`);
    }
    if (mean.distance !== null) words.push(`mean distance ${mean.distance.toFixed(1)}`);
    return words.join(", ");
  }

  /** Puts the tiles in the order asked for. */
  arrange() {
    const order = this.order.value;
    this.box.replaceChildren();
    this.box.classList.toggle("ranked", order !== "layer");
    if (order === "layer") this.arrangeByLayer();
    else this.arrangeByStatistic(order);
    if (this.page.shown) this.mark();
    this.box.scrollTop = 0; // who sorts wants to see the first
    this.page.find("overview-note").textContent =
      (order === "layer" ? "One row a layer. " : "") +
      "Each small map shows the largest weight in each of its cells, in log colour. " +
      "Arrow keys move, Enter opens.";
  }

  arrangeByLayer() {
    const { layers } = this.page.run;
    const rows = layers.map((_, layerIndex) => {
      const row = make("div", "row");
      row.append(make("span", "number", this.page.labels[layerIndex]));
      return row;
    });
    for (const tile of this.tiles) {
      tile.caption.textContent = "";
      rows[tile.layerIndex].append(tile.button);
    }
    for (const group of new Set(layers.map(groupOf))) {
      this.box.append(make("h3", "", group), ...rows.filter((_, index) => groupOf(layers[index]) === group));
    }
  }

  arrangeByStatistic(statistic) {
    const upward = statistic === "entropy" ? 1 : -1;
    const valueOf = (tile) => tile.layer.heads[tile.headIndex].mean[statistic];
    const last = (value) => (value === null ? Infinity : upward * value);
    for (const tile of this.tiles.slice().sort((a, b) => (last(valueOf(a)) - last(valueOf(b))) || 0)) {
      const value = valueOf(tile);
      const shown = value === null ? "–" : statistic === "sink" ? percent(value) : value.toFixed(1);
      tile.caption.textContent = `${this.page.labels[tile.layerIndex]}·${tile.headIndex}  ${shown}`;
      this.box.append(tile.button);
    }
  }

  /** Arrow keys: sideways to the next head, up and down to the nearest in the next row. */
  move(event) {
    const buttons = Array.from(this.box.querySelectorAll("button"));
    const from = buttons.indexOf(this.page.root.activeElement);
    const to = from < 0 ? -1 : stepTo(event.key, from, buttons);
    if (to < 0) return;
    event.preventDefault();
    for (const button of buttons) button.tabIndex = -1;
    buttons[to].tabIndex = 0;
    buttons[to].focus();
  }

  mark() {
    const { layer, head } = this.page.view;
    for (const tile of this.tiles) {
      const chosen = tile.layerIndex === layer && tile.headIndex === head;
      tile.button.tabIndex = chosen ? 0 : -1;
      if (chosen) {
        if (!tile.button.hasAttribute("aria-current")) revealIn(this.box, tile.button);
        tile.button.setAttribute("aria-current", "true");
      } else tile.button.removeAttribute("aria-current");
    }
  }

  paint() {
    this.mark();
    if (this.drawn !== this.page.theme.dark) this.draw();
  }

  /** Draws every small map; again when the theme changes. */
  async draw() {
    const { dark } = this.page.theme;
    this.drawn = dark;
    for (const layer of this.page.run.layers) {
      const { block: number, rows, columns, decades } = layer.thumbnail;
      const codes = await this.page.run.source.block(number);
      const scale = new Scale("log", layer.keys, dark);
      const steps = Uint8Array.from({ length: 256 }, (_, code) =>
        (code === 0 ? 0 : scale.step(10 ** (decades * ((code - 1) / 254 - 1)))));
      for (const tile of this.tiles.filter((each) => each.layer === layer)) {
        const image = new ImageData(columns, rows);
        const base = tile.headIndex * rows * columns;
        for (let cell = 0; cell < rows * columns; cell++) {
          const step = steps[codes[base + cell]];
          for (let c = 0; c < 3; c++) image.data[4 * cell + c] = scale.table[3 * step + c];
          image.data[4 * cell + 3] = 255;
        }
        tile.canvas.getContext("2d").putImageData(image, 0, 0);
      }
    }
    this.page.host.dataset.overview = "drawn";
  }
}
