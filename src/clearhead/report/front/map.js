// ---- The weights of one head as a picture, a whole number of device pixels a cell.

/** How far the weights of the page are from the model's: what was measured when it was written. */
const measuredError = ({ error }) => (error === null ? "" : `, within ${error.toExponential(1)} of the model's`);

class MapPane {
  constructor(page) {
    this.page = page;
    this.canvas = page.find("map");
    this.layout = null;
    this.pool = null;
    this.pooled = "";
    this.job = 0;
    this.listen();
  }

  /** The geometry of the map and the numbers that its cells show. */
  get geometry() {
    return { ...this.layout, pool: Array.from(this.pool) };
  }

  /** Computes the picture of a head where it is not there yet, and draws it with its marks. */
  async paint(shown) {
    const { page } = this;
    const { head } = shown;
    const ratio = window.devicePixelRatio || 1;
    const width = page.find("map-box").clientWidth;
    const tallest = Math.max(280, Math.round(0.84 * window.innerHeight));
    const layout = layoutMap(head, shown.names, width, tallest, ratio);
    const wanted = `${page.view.layer}/${page.view.head} ${layout.down.per} ${layout.across.per} ${shown.scale.relative}`;
    this.layout = layout;
    this.size();
    this.describe(shown);
    paintLegend(page, shown);
    if (this.pooled === wanted) {
      this.draw(); // there already, or being computed and drawn as it comes
      return;
    }
    const job = ++this.job;
    const show = (pool) => {
      this.pool = pool;
      this.draw();
    };
    this.pooled = wanted;
    this.pool = null;
    page.host.dataset.map = "drawing";
    const pool = await poolOf(head, layout.down.per, layout.across.per, () => job === this.job, show);
    if (pool === null) return;
    show(pool);
    page.host.dataset.map = "drawn";
  }

  hover() {
    if (this.pool) this.draw();
  }

  size() {
    const { canvas, layout } = this;
    const width = layout.left + layout.across.length + Math.ceil(2 * layout.ratio);
    const height = layout.top + layout.down.length + Math.ceil(2 * layout.ratio);
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    canvas.style.width = `${width / layout.ratio}px`;
    canvas.style.height = `${height / layout.ratio}px`;
  }

  describe({ head, layer }) {
    const { down, across } = this.layout;
    const { view, labels } = this.page;
    this.page.find("map-title").textContent = `The weights of layer ${labels[view.layer]}, head ${view.head}`;
    this.page.find("map-note").textContent = (down.per === 1 && across.per === 1
      ? `Each cell is the weight of one pair${measuredError(layer)}. `
      : `Each cell shows the largest weight of ${down.per} × ${across.per} pairs. `) +
      "Bars: attention each key receives, cut at 4 × the average. " +
      "Point at the map, or focus it and use the arrow keys.";
    const sizes = `${plural(head.queries, "query")} on ${plural(head.keys, "key")}`;
    this.canvas.setAttribute("aria-label", `weights of ${sizes}: arrow keys move over the pairs`);
  }

  /** The pool as an image of one pixel a cell; cells with no allowed pair stay clear. */
  image({ scale, head }) {
    const { down, across } = this.layout;
    const image = new ImageData(across.cells, down.cells);
    const odd = channels(this.page.theme.dark ? "#ff5c5c" : "#e00000"); // not a number
    const counts = countsOf(head);
    this.pool.forEach((weight, cell) => {
      if (weight < 0) return;
      const step = scale.step(scale.value(weight, counts[Math.floor(cell / across.cells) * down.per]));
      for (let c = 0; c < 3; c++) image.data[4 * cell + c] = weight === weight ? scale.table[3 * step + c] : odd[c];
      image.data[4 * cell + 3] = 255;
    });
    const canvas = document.createElement("canvas");
    canvas.width = across.cells;
    canvas.height = down.cells;
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }

  /** Draws picture, bars, labels and the cross of the chosen pair. */
  draw() {
    const { layout, pool, page } = this;
    const { shown } = page;
    if (!pool || !shown || pool.length !== layout.across.cells * layout.down.cells) return;
    const { colours } = page.theme;
    const { canvas } = this;
    const pen = canvas.getContext("2d");
    const { left, top, across, down } = layout;
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.save();
    pen.translate(left, top);
    pen.fillStyle = hatching(pen, colours, layout.ratio);
    pen.fillRect(0, 0, across.length, down.length);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.image(shown), 0, 0, across.length, down.length);
    pen.restore();
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.strokeRect(left - 0.5, top - 0.5, across.length + 1, down.length + 1);
    drawBars(pen, shown.head, layout, colours);
    const pair = page.hovered ?? shown;
    drawLabels(pen, shown, pair, layout, colours);
    drawCross(pen, pair, layout, colours);
  }

  listen() {
    const { canvas, page } = this;
    const pairAt = (event) => {
      const box = canvas.getBoundingClientRect();
      const cell = this.layout && page.shown && cellAt(this.layout, event.clientX - box.left, event.clientY - box.top);
      return cell ? strongestIn(page.shown.head, this.layout, cell) : null;
    };
    canvas.addEventListener("pointermove", (event) => {
      const found = pairAt(event);
      page.hover(found && { i: found.i, j: found.j });
    });
    canvas.addEventListener("pointerleave", () => page.hover(null));
    canvas.addEventListener("click", (event) => {
      const found = pairAt(event);
      if (found) page.choose(pairOf(page.view.view, found.i, found.j));
    });
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const step = steps[event.key];
      if (!step || !page.shown) return;
      event.preventDefault();
      const { head, i, j } = page.shown;
      const { down, across } = this.layout;
      const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
      page.choose(pairOf(page.view.view,
        clamp((i ?? 0) + step[0] * down.per, head.queries),
        clamp((j ?? 0) + step[1] * across.per, head.keys)), false);
    });
  }
}

