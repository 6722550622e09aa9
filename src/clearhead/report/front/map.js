// ---- The weights of one head as a picture: from the whole head to single pairs.

/** How far the weights of the page are from the model's: what was measured when it was written. */
const measuredError = ({ error }) => (error === null ? "" : `, within ${error.toExponential(1)} of the model's`);

/** A part of the map in an address: queries from and to, keys from and to. */
function rectangleIn(text) {
  if (!/^\d{1,9}(\.\d{1,9}){3}$/.test(text ?? "")) return null;
  const [top, bottom, left, right] = text.split(".").map(Number);
  return top < bottom && left < right ? text : null;
}

View.more.set("zoom", rectangleIn);
View.more.set("pool", (text) => (text === "mean" ? "mean" : null));

class MapPane {
  constructor(page) {
    this.page = page;
    this.canvas = page.find("map");
    this.under = page.find("map-picture");
    this.layout = null;
    this.pair = "";
    this.picture = new Picture(new Helper(), () => this.schedule());
    this.lens = new Lens(page.find("lens"));
    this.listen();
  }

  /** The geometry of the map and what it shows. */
  get geometry() {
    const { layout, page } = this;
    const side = ({ count, per, cell, cells, length, room, offset, seen }, at) => {
      const axis = layout[at];
      const words = hasWords(axis, layout.ratio) ? labelled(axis, layout.ratio, 0) : [];
      return { count, per, cell, cells, length, room, offset, seen, words };
    };
    const { left, top, ratio } = layout;
    const pool = layout.whole ? this.picture.valuesOf(page.shown.head, layout, this.kind) : null;
    return {
      left, top, ratio, pool, ...this.kind, lens: this.lens.seen,
      down: side(layout.down, "down"), across: side(layout.across, "across"),
    };
  }

  /** What the cells show. */
  get kind() {
    const { layout, page } = this;
    return { mean: page.view.pool === "mean" && !layout.single, relative: page.shown.scale.relative };
  }

  paint(shown) {
    const { page } = this;
    const { head, layer } = shown;
    const ratio = window.devicePixelRatio || 1;
    const width = page.find("map-box").clientWidth;
    const tallest = Math.max(280, Math.round(0.84 * window.innerHeight));
    const frame = [width, tallest, ratio, head.queries, head.keys, layer.queryText, layer.keyText].join();
    if (this.frame !== frame) {
      this.frame = frame;
      this.layout = new Layout(head, shown.names, width, tallest, ratio);
      this.zoomed = null;
    }
    const { zoom } = page.view;
    if (this.zoomed !== zoom) this.layout.show(zoom);
    this.zoomed = zoom;
    this.size();
    this.follow(shown);
    paintLegend(page, shown);
    this.lens.hide();
    this.hatch = null;
    page.host.dataset.map = "drawing";
    this.say();
    this.describe();
    this.announce();
    this.look();
  }

  /** Shows a pair that has become the chosen one and is out of sight. */
  follow({ i, j }) {
    const pair = `${this.frame} ${i} ${j}`;
    const before = this.pair;
    this.pair = pair;
    if (i === null || j === null || before === pair || !before.startsWith(this.frame)) return;
    this.layout.down.reveal(i);
    this.layout.across.reveal(j);
    this.tell();
  }

  /** The view has changed: asks for its tiles, and draws what is there. */
  look() {
    const { layout, picture, page, kind } = this;
    const sight = picture.inSight(page.shown.head, layout, kind);
    picture.want(sight);
    this.schedule();
  }

  /** Puts what is seen into the address, without a step for Back. */
  tell() {
    const { view } = this.page;
    this.zoomed = this.layout.address;
    if (view.zoom === this.zoomed) return;
    view.zoom = this.zoomed;
    clearTimeout(this.telling);
    this.telling = setTimeout(() => {
      this.announce();
      this.page.onaddress(view.address, false);
    }, 150);
  }

  size() {
    const { layout } = this;
    const { width, height, ratio } = layout;
    for (const canvas of [this.canvas, this.under]) {
      if (canvas.width !== width) canvas.width = width;
      if (canvas.height !== height) canvas.height = height;
      canvas.style.width = `${width / ratio}px`;
      canvas.style.height = `${height / ratio}px`;
    }
  }

  /** What the cells show, and where one can go from here. */
  describe() {
    const { layout, page } = this;
    const { down, across } = layout;
    const { head, layer } = page.shown;
    const { view } = page;
    page.find("map-title").textContent = `The weights of ${headName(page, view)}`;
    const pairs = `${down.per} × ${across.per} pairs`;
    const mean = view.pool === "mean";
    page.find("map-note").textContent = (layout.single
      ? `Each cell is the weight of one pair${measuredError(layer)}. `
      : `Each cell shows the ${mean ? "mean weight" : "largest weight"} of ${pairs}. `) +
      "Bars above: what each key receives, as a multiple of what it would if every query looked at all alike " +
      "(up: more; with a dark end: cut at 16 × or 1/8 ×). " +
      (head.entropy ? "Bars at the right: the entropy of each query; to the line: all alike." : "");
    page.find("map-pool").hidden = layout.single;
    for (const input of page.root.querySelectorAll("[name=pool]")) input.checked = (input.value === "mean") === mean;
    page.find("zoom-in").disabled = layout.closest;
    page.find("zoom-out").disabled = layout.whole;
    page.find("zoom-whole").disabled = layout.whole;
    this.canvas.classList.toggle("zoomed", !layout.whole);
  }

  /** What is in sight, for screen readers. */
  announce() {
    const { down, across, whole } = this.layout;
    const { head } = this.page.shown;
    const sizes = `${plural(head.queries, "query")} on ${plural(head.keys, "key")}`;
    const part = whole ? "" : `, of which queries ${down.seen[0]} to ${down.seen[1] - 1} and ` +
      `keys ${across.seen[0]} to ${across.seen[1] - 1} are in sight`;
    this.canvas.setAttribute("aria-label",
      `weights of ${sizes}${part}: arrow keys move over the pairs, plus and minus zoom, 0 shows all`);
  }

  hover() {
    this.say();
    this.scheduleMarks();
  }

  /** Draws with the next frame. */
  schedule() {
    this.stale = true;
    this.scheduleMarks();
  }

  scheduleMarks() {
    this.frameAsked ??= requestAnimationFrame(() => {
      this.frameAsked = null;
      if (this.stale) {
        this.stale = false;
        this.draw();
      }
      this.drawMarks();
    });
  }

  draw() {
    const { layout, page, under } = this;
    const { shown } = page;
    const { colours } = page.theme;
    const { left, top, across, down } = layout;
    const pen = under.getContext("2d");
    pen.clearRect(0, 0, under.width, under.height);
    this.hatch ??= hatching(pen, colours, layout.ratio);
    pen.save();
    pen.beginPath();
    pen.rect(left, top, across.room, down.room);
    pen.clip();
    pen.translate(left, top);
    const all = this.picture.draw(pen, shown, layout, this.kind, this.hatch, this.odd);
    pen.restore();
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.strokeRect(left - 0.5, top - 0.5, across.room + 1, down.room + 1);
    drawBars(pen, shown, layout, page.view.pool === "mean", colours);
    drawLabels(pen, shown, layout, colours);
    if (all) page.host.dataset.map = "drawn";
  }

  /** The colour of what is no number. */
  get odd() {
    return this.page.theme.dark ? "#ff5c5c" : "#e00000";
  }

  /** The pair that is meant: the one under the pointer or previewed in the text, else the chosen one. */
  get meant() {
    const { hovered, shown } = this.page;
    return hovered ?? { i: shown.i, j: shown.j };
  }

  /** Marks the pair that is meant, over the picture: that stays as it is. */
  drawMarks() {
    const { canvas, layout, page } = this;
    const { colours } = page.theme;
    const pen = canvas.getContext("2d");
    pen.clearRect(0, 0, canvas.width, canvas.height);
    const pair = this.meant;
    drawCross(pen, page.shown, pair, layout, colours);
    const pointed = page.hovered || page.root.activeElement === canvas;
    const both = pair.i !== null && pair.j !== null;
    if (!pointed || !both || this.closed) this.lens.hide();
    else this.lens.show(page.shown, pair, layout, colours, this.odd);
  }

  /** Says under the map what is known of the pair that is meant. */
  async say() {
    const { shown } = this.page;
    const { head, names } = shown;
    const { i, j } = this.meant;
    const line = this.page.find("map-pair");
    const turn = this.turn = {};
    if (i === null || j === null) {
      const even = i === null ? null : evenness(head)?.[i];
      line.textContent = j !== null
        ? `“${nameOf(names[1], j)}” receives ${times(receivedRatios(head)[j])} ` +
          (head.expected ? "what it would if all were looked at alike" : "what keys receive on average")
        : i === null ? "" : `“${nameOf(names[0], i)}” looks at ${plural(countsOf(head)[i], "key")}` +
          (even === undefined || even === null || even !== even ? "" : `; its entropy is ${percent(even)} of the most it could be`);
      return;
    }
    const pair = pairName(names, i, j);
    if (!mayLook(head, i, j)) {
      line.textContent = `${pair} masked: may not look`;
      return;
    }
    const count = countsOf(head)[i];
    const weight = weightOf(head, i, j);
    const show = (place) => {
      line.textContent = `${pair} ${percent(weight)}, ${place}${times(weight * count)} uniform`;
    };
    if (head.keys > LONG) show("");
    const found = head.keys > LONG ? await this.picture.helper.ask(head, "place", { i, j }).answer : placeInRow(head, i, j);
    if (turn === this.turn && found) show(`rank ${found[1]} of ${found[2]}, `);
  }

  /** The strongest pair under a point, or a whole token beside the picture. */
  pairAt([x, y]) {
    const { layout } = this;
    const { shown } = this.page;
    if (!layout || !shown) return null;
    const at = layout.pointAt(x, y);
    if (at.i === null || at.j === null) return at.i === null && at.j === null ? null : at;
    if (layout.single) return at;
    const { i, j } = strongestIn(shown.head, at, layout.down.per, layout.across.per);
    return { i, j };
  }

  /** Shows the map at another of its scales; what is under a point stays there: else the pair, else the middle. */
  zoom(to, point) {
    const { layout } = this;
    const { ratio } = layout;
    const { i, j } = this.page.shown;
    const middle = (axis, index) => {
      const start = index === null ? -1 : axis.startOf(index) + axis.cell / 2;
      return start >= 0 && start < axis.room ? start : axis.room / 2;
    };
    const at = point ? [point[0] * ratio - layout.left, point[1] * ratio - layout.top]
      : [middle(layout.across, j), middle(layout.down, i)];
    layout.scaleTo(to, ...at);
    this.describe();
    this.changed();
  }

  /** Another part of the map is seen. */
  changed() {
    this.tell();
    this.page.host.dataset.map = "drawing";
    this.look();
  }

  listen() {
    const { canvas, page } = this;
    const zoomTo = (factor, point) => this.zoom(this.layout.times(factor), point);
    const whole = () => {
      this.layout.show(null);
      this.describe();
      this.changed();
    };
    this.gestures = new Gestures(canvas, {
      zoom: (step, point) => {
        const { lead } = this.layout;
        this.zoom(Math.min(lead.scales.length - 1, Math.max(0, lead.at + step)), point);
      },
      zoomTo,
      scale: () => this.layout.lead.pixels,
      scaleTo: (pixels, point) => this.zoom(this.layout.lead.nearest(pixels), point),
      free: (way) => !(way > 0 ? this.layout.closest : this.layout.whole),
      drag: (x, y) => {
        const { across, down, ratio } = this.layout;
        across.moveTo(across.offset - x * ratio);
        down.moveTo(down.offset - y * ratio);
        this.changed();
      },
      point: (point) => {
        this.closed = false;
        page.hover(point && this.pairAt(point));
      },
      choose: (point) => {
        const found = this.pairAt(point);
        this.closed = false;
        if (found && found.i !== null && found.j !== null) page.choose(pairOf(page.view.view, found.i, found.j));
      },
    });
    page.find("zoom-in").addEventListener("click", () => zoomTo(2));
    page.find("zoom-out").addEventListener("click", () => zoomTo(0.5));
    page.find("zoom-whole").addEventListener("click", whole);
    for (const input of page.root.querySelectorAll("[name=pool]")) {
      input.addEventListener("change", () => page.choose({ pool: input.value === "mean" ? "mean" : null }, false));
    }
    for (const name of ["focus", "blur"]) canvas.addEventListener(name, () => page.shown && this.scheduleMarks());
    canvas.addEventListener("keydown", (event) => {
      if (!page.shown || event.ctrlKey || event.metaKey || event.altKey) return;
      const { head, i, j } = page.shown;
      const { down, across } = this.layout;
      const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const others = {
        "+": () => zoomTo(2), "=": () => zoomTo(2), "-": () => zoomTo(0.5), 0: whole,
        Escape: () => { this.closed = true; this.scheduleMarks(); },
      };
      const step = steps[event.key];
      if (!step && !others[event.key]) return;
      event.preventDefault();
      if (!step) return void others[event.key]();
      this.closed = false;
      const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
      page.choose(pairOf(page.view.view,
        clamp((i ?? 0) + step[0] * down.per, head.queries),
        clamp((j ?? 0) + step[1] * across.per, head.keys)), false);
    });
  }
}
