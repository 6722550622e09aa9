// ---- Two heads beside each other: what one attends to more than the other.

const BESIDE = 46; // CSS pixels of the bars beside the map

/** A side of the comparison from the address: a head, `pins`, the average of those, or `uniform`. */
function sideIn(text, run) {
  if (text === "pins" || text === "uniform") return text;
  const [found, ...more] = placesIn(text, run);
  return found && !more.length ? keyOf(found) : null;
}
View.more.set("a", sideIn);
View.more.set("b", sideIn);

function sideName(page, side) {
  const { run, view } = page;
  if (side === "uniform") return "uniform attention";
  if (side === "pins") return `average of the ${placesIn(view.pins, run).length} pinned`;
  return headName(page, placesIn(side, run)[0]);
}

class ComparePane {
  constructor(page) {
    this.page = page;
    this.canvas = page.find("apart");
    this.job = 0;
    page.find("swap").addEventListener("click", () => page.choose({ a: page.view.b, b: page.view.a }));
    page.find("stop-comparing").addEventListener("click", () => page.choose({ a: null, b: null }));
    const pairAt = (event) => this.found && this.pairAt(event.offsetX, event.offsetY);
    this.canvas.addEventListener("pointermove", (event) => page.hover(pairAt(event)));
    this.canvas.addEventListener("pointerleave", () => page.hover(null));
    this.canvas.addEventListener("click", (event) => this.take(pairAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  /** The promise of a side: its name, and the heads that it is the mean of; uniform attention has none. */
  async open(side) {
    const { page } = this;
    const places = side === "uniform" ? [] : placesIn(side === "pins" ? page.view.pins : side, page.run);
    const heads = await Promise.all(places.map(({ layer, head }) => page.run.open(layer, head)));
    return { name: sideName(page, side), heads, places };
  }

  /** The divergence of each query, their mean, and the pairs that differ most. */
  get numbers() {
    const { byQuery, mean, compared, largest } = this.found;
    return { byQuery: Array.from(byQuery), mean, compared, largest };
  }

  async paint(shown) {
    const { page } = this;
    const { a, b, pins } = page.view;
    const section = page.find("compare");
    const started = section.hidden && page.host.dataset.shown !== undefined;
    section.hidden = a === null || b === null;
    if (started && !section.hidden) section.scrollIntoView({ block: "nearest" });
    if (section.hidden) {
      this.wanted = this.found = null;
      return;
    }
    const wanted = [a, b, pins, page.host.clientWidth].join();
    if (this.wanted === wanted) {
      if (this.found) this.draw(shown);
      return;
    }
    this.wanted = wanted;
    this.found = null;
    const job = ++this.job;
    delete page.host.dataset.compare;
    const sides = await Promise.all([a, b].map((side) => this.open(side)));
    if (job !== this.job) return;
    page.find("compare-title").textContent = `${sides[0].name} − ${sides[1].name}`;
    const objection = objectionTo(...sides);
    page.find("compare-shown").hidden = objection !== null;
    page.find("compare-said").textContent = objection ?? "Comparing …";
    if (objection === null) {
      this.sides = sides;
      const [head] = [...sides[0].heads, ...sides[1].heads];
      this.head = head;
      const [{ layer }] = [...sides[0].places, ...sides[1].places];
      this.names = [page.texts[page.run.layers[layer].queryText], page.texts[page.run.layers[layer].keyText]];
      this.fit();
      const { down, across } = this;
      const found = await differenceOf(...sides, down.per, across.per, () => job === this.job && this.wanted === wanted);
      if (found === null) return;
      this.found = found;
      this.say();
      this.draw(page.shown);
    }
    page.host.dataset.compare = "drawn";
  }

  hover(pair) {
    if (this.found) this.draw(this.page.shown, pair);
  }

  /** Cells of a whole number of CSS pixels, with room for words where these fit. */
  fit() {
    const width = this.page.find("apart-box").clientWidth;
    const axis = (count, room) => {
      const per = Math.ceil(count / room);
      const cells = Math.ceil(count / per);
      return { per, cells, cell: Math.max(1, Math.min(28, Math.floor(room / cells))) };
    };
    const { queries, keys } = this.head;
    this.left = (width - 90 - BESIDE) / keys >= 13 && queries < 60 ? 90 : 0;
    this.top = this.left ? 76 : 0;
    const room = Math.max(40, width - this.left - BESIDE);
    this.across = axis(keys, room);
    this.down = axis(queries, Math.max(40, Math.round((room * queries) / keys)));
    if (queries === keys) this.down = this.across;
  }

  say() {
    const { mean, compared, leftOut, step } = this.found;
    const { page } = this;
    const { queries } = this.head;
    page.find("compare-said").textContent = compared === 0 ? "No query can be compared: their masks differ, or none sees a key."
      : `They are ${mean.toPrecision(3)} nats apart: the Jensen–Shannon divergence of their weights, a mean over ` +
        `${plural(compared, "query")}. 0 is the same weights, ${Math.LN2.toFixed(3)} nothing in common.` +
        (step > 1 ? ` Every ${step === 2 ? "second" : `${step}th`} query of ${queries.toLocaleString("en")} is compared.` : "") +
        (leftOut ? ` ${plural(leftOut, "query")} left out: the masks differ, or leave no key.` : "");
    this.canvas.setAttribute("aria-label", `differences of ${this.sides[0].name} and ${this.sides[1].name}: arrow keys move over the pairs`);
    const [a, b] = this.sides;
    page.find("apart-less").textContent = `${b.name} more`;
    page.find("apart-more").textContent = `${a.name} more`;
    page.find("apart-list").replaceChildren(...this.found.largest.map(({ i, j, a: p, b: q }) => {
      const button = make("button", "other");
      button.type = "button";
      button.append(make("span", "name", pairName(this.names, i, j)),
        make("span", "", `${percent(p)} and ${percent(q)}`),
        make("span", "share", `${signed(100 * (p - q), 1)}`.replace(/^(?=\d)/, "+")));
      button.addEventListener("click", () => this.take({ i, j }));
      const item = make("li");
      item.append(button);
      return item;
    }));
  }

  /** The pair with the largest difference in the cell at a point. */
  pairAt(x, y) {
    const { left, top, across, down } = this;
    const [row, column] = [Math.floor((y - top) / down.cell), Math.floor((x - left) / across.cell)];
    if (row < 0 || column < 0 || row >= down.cells || column >= across.cells) return null;
    let best = { i: row * down.per, j: column * across.per, size: -1 };
    for (let i = row * down.per; i < Math.min(this.head.queries, (row + 1) * down.per); i++) {
      for (let j = column * across.per; j < Math.min(this.head.keys, (column + 1) * across.per); j++) {
        const [p, q] = this.weightsAt(i, j);
        if (Math.abs(p - q) > best.size) best = { i, j, size: Math.abs(p - q) };
      }
    }
    return { i: best.i, j: best.j };
  }

  weightsAt(i, j) {
    const may = mayLook(this.head, i, j);
    return this.sides.map(({ heads }) => (!may ? 0 : !heads.length ? equalShare(this.head, i)
      : heads.reduce((sum, head) => sum + weightOf(head, i, j), 0) / heads.length));
  }

  /** Chooses a pair; of another text, with the first head that is compared. */
  take(pair) {
    if (pair === null) return;
    const { view, run, shown } = this.page;
    const [place] = this.sides.flatMap(({ places }) => places);
    const { queryText, keyText } = place ? run.layers[place.layer] : shown.layer;
    const same = shown.layer.queryText === queryText && shown.layer.keyText === keyText;
    this.page.choose({ ...(same ? {} : place), ...pairOf(view.view, pair.i, pair.j) });
  }

  move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.found) return;
    event.preventDefault();
    const { i, j } = this.page.shown;
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
    this.take({
      i: clamp((i ?? 0) + step[0] * this.down.per, this.head.queries),
      j: clamp((j ?? 0) + step[1] * this.across.per, this.head.keys),
    });
  }

  /** The largest difference, to which the colours reach. */
  get limit() {
    const [first] = this.found.largest;
    return first ? Math.abs(first.a - first.b) : 1;
  }

  draw({ i: chosenRow, j: chosenColumn }, hovered = this.page.hovered) {
    const { canvas, found, left, top, across, down, page, limit } = this;
    const { colours, dark } = page.theme;
    const table = signedTables[dark ? "dark" : "light"];
    const ratio = window.devicePixelRatio || 1;
    const [wide, tall] = [across.cells * across.cell, down.cells * down.cell];
    const size = [left + wide + BESIDE, top + tall + 2];
    canvas.width = Math.round(size[0] * ratio);
    canvas.height = Math.round(size[1] * ratio);
    canvas.style.width = `${size[0]}px`;
    canvas.style.height = `${size[1]}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = hatching(pen, colours, 1);
    pen.fillRect(left, top, wide, tall);
    const image = new ImageData(found.columns, down.cells);
    found.pool.forEach((apart, cell) => {
      if (apart !== apart) return;
      const step = 3 * signedStep(Math.sign(apart) * Math.sqrt(Math.abs(apart) / limit));
      image.data.set([...table.subarray(step, step + 3), 255], 4 * cell);
    });
    const small = document.createElement("canvas");
    small.width = found.columns;
    small.height = down.cells;
    small.getContext("2d").putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, left, top, wide, tall);
    pen.strokeStyle = colours.line;
    pen.strokeRect(left - 0.5, top - 0.5, wide + 1, tall + 1);
    pen.fillStyle = colours.bar;
    for (let row = 0; row < down.cells; row++) {
      let most = 0;
      for (const value of found.byQuery.subarray(row * down.per, (row + 1) * down.per)) if (value > most) most = value;
      pen.fillRect(left + wide + 4, top + row * down.cell, ((BESIDE - 6) * most) / Math.LN2, Math.max(1, down.cell - 1));
    }
    const pair = hovered ?? { i: chosenRow, j: chosenColumn };
    if (left) this.label(pen, pair);
    pen.strokeStyle = colours.accent;
    const inside = (at, count) => at !== null && at !== undefined && at < count;
    const [row, column] = [inside(pair.i, this.head.queries), inside(pair.j, this.head.keys)];
    const [x, y] = [left + Math.floor(pair.j / across.per) * across.cell, top + Math.floor(pair.i / down.per) * down.cell];
    if (row) pen.strokeRect(left - 0.5, y - 0.5, wide + 1, down.cell + 1);
    if (column) pen.strokeRect(x - 0.5, top - 0.5, across.cell + 1, tall + 1);
    this.tell(row && column ? pair : null);
    drawRamp(page.find("apart-ramp"), table);
    const ends = [-1, -0.25, 0, 0.25, 1].map((share) => `${share > 0 ? "+" : ""}${signed(100 * share * limit, limit < 0.1 ? 2 : 0)}`);
    page.find("apart-ticks").replaceChildren(...ends.map((words) => make("span", "", words)));
  }

  label(pen, pair) {
    const { left, top, across, down, head, page: { theme: { colours } } } = this;
    pen.textBaseline = "middle";
    const write = (words, at, x, y, turn, chosen) => {
      pen.save();
      pen.translate(x, y);
      pen.rotate(turn);
      pen.font = `${chosen ? "600 " : ""}11px system-ui, sans-serif`;
      pen.fillStyle = chosen ? colours.accent : colours.quiet;
      pen.textAlign = turn ? "left" : "right";
      pen.fillText(shortened(words[at].label, 12), 0, 0, turn ? 70 : 84);
      pen.restore();
    };
    for (let i = 0; i < head.queries; i++) write(this.names[0], i, left - 5, top + (i + 0.5) * down.cell, 0, i === pair.i);
    for (let j = 0; j < head.keys; j++) {
      write(this.names[1], j, left + (j + 0.5) * across.cell, top - 5, -Math.PI / 2, j === pair.j);
    }
  }

  /** The pair that is looked at, in words. */
  tell(pair) {
    const say = this.page.find("apart-pair");
    if (pair === null) {
      say.textContent = "";
      return;
    }
    const [p, q] = this.weightsAt(pair.i, pair.j);
    const apart = this.found.byQuery[pair.i];
    const name = pairName(this.names, pair.i, pair.j);
    say.textContent = `${name}: ${!mayLook(this.head, pair.i, pair.j) ? "masked" : `${percent(p)} and ${percent(q)}`}` +
      (apart === apart ? `; the query's weights are ${apart.toFixed(3)} nats apart` : "");
  }
}
