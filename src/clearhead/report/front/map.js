// ---- The weights of one head as a picture, a whole number of device pixels a cell.

/** What the canvas shows: geometry, the pool it was coloured from, and the colours as an image. */
const mapView = { current: null, layout: null, pool: null, pooled: "", job: 0, image: null, imaged: "" };

/** Computes the picture of a head where it is not there yet, and draws it with its marks. */
async function paintMap(current, layerAndHead) {
  const { head } = current;
  const ratio = window.devicePixelRatio || 1;
  const width = byId("map-box").clientWidth;
  const tallest = Math.max(280, Math.round(0.84 * window.innerHeight));
  const layout = layoutMap(head, width, tallest, ratio);
  const wanted = `${layerAndHead} ${layout.down.per} ${layout.across.per}`;
  mapView.current = current;
  mapView.layout = layout;
  sizeCanvas(layout);
  describeMap(current, layout);
  if (mapView.pooled === wanted) {
    drawMap(); // there already, or being computed and drawn as it comes
    return;
  }
  const job = ++mapView.job;
  const show = (pool) => {
    mapView.pool = pool;
    mapView.imaged = "";
    drawMap();
  };
  mapView.pooled = wanted;
  mapView.pool = null;
  document.documentElement.dataset.map = "drawing";
  const pool = await poolOf(head, layout.down.per, layout.across.per, () => job === mapView.job, show);
  if (pool === null) return;
  show(pool);
  document.documentElement.dataset.map = "drawn";
}

function sizeCanvas(layout) {
  const canvas = byId("map");
  const width = layout.left + layout.across.length + Math.ceil(2 * layout.ratio);
  const height = layout.top + layout.down.length + Math.ceil(2 * layout.ratio);
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  canvas.style.width = `${width / layout.ratio}px`;
  canvas.style.height = `${height / layout.ratio}px`;
}

/** How far the weights of the page are from the model's: what was measured when it was written. */
const measuredError = ({ error }) => (error === null ? "" : `, within ${error.toExponential(1)} of the model's`);

function describeMap({ head }, { down, across }) {
  byId("map-note").textContent = (down.per === 1 && across.per === 1
    ? `Each cell is the weight of one pair${measuredError(head.layer)}. `
    : `Each cell shows the largest weight of ${down.per} × ${across.per} pairs. `) +
    "Bars: attention each key receives, cut at 4 × the average. " +
    "Point at the map, or focus it and use the arrow keys.";
  const sizes = `${plural(head.queries, "query")} on ${plural(head.keys, "key")}`;
  byId("map").setAttribute("aria-label", `weights of ${sizes}: arrow keys move over the pairs`);
}

/** The pool as an image of one pixel a cell; cells with no allowed pair stay clear. */
function colourPool({ table, scale, floor }) {
  const { down, across } = mapView.layout;
  const wanted = `${scale} ${darkTheme.matches}`;
  if (mapView.imaged === wanted) return mapView.image;
  mapView.imaged = wanted;
  const image = new ImageData(across.cells, down.cells);
  const odd = channels(darkTheme.matches ? "#ff5c5c" : "#e00000"); // not a number
  mapView.pool.forEach((weight, cell) => {
    if (weight < 0) return;
    const step = stepOf(weight, scale, floor);
    for (let c = 0; c < 3; c++) image.data[4 * cell + c] = weight === weight ? table[3 * step + c] : odd[c];
    image.data[4 * cell + 3] = 255;
  });
  const canvas = document.createElement("canvas");
  canvas.width = across.cells;
  canvas.height = down.cells;
  canvas.getContext("2d").putImageData(image, 0, 0);
  mapView.image = canvas;
  return canvas;
}

/** Draws picture, bars, labels and the cross of the chosen pair. */
function drawMap() {
  const { current, layout, pool } = mapView;
  if (!pool || pool.length !== layout.across.cells * layout.down.cells) return;
  const colours = themeColours();
  const canvas = byId("map");
  const pen = canvas.getContext("2d");
  const { left, top, across, down } = layout;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.save();
  pen.translate(left, top);
  pen.fillStyle = hatching(pen, colours, layout.ratio);
  pen.fillRect(0, 0, across.length, down.length);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(colourPool(current), 0, 0, across.length, down.length);
  pen.restore();
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1;
  pen.strokeRect(left - 0.5, top - 0.5, across.length + 1, down.length + 1);
  drawBars(pen, current.head, layout, colours);
  drawLabels(pen, current, layout, colours);
  drawCross(pen, current, layout, colours);
}

function drawBars(pen, head, { left, top, across, ratio }, colours) {
  const tall = Math.round(22 * ratio);
  const seeing = countsOf(head).reduce((sum, count) => sum + (count > 0 ? 1 : 0), 0);
  const most = (4 * seeing) / head.keys;
  if (!(most > 0)) return;
  for (let cell = 0; cell < across.cells; cell++) {
    let received = 0;
    for (let j = cell * across.per; j < Math.min(head.keys, (cell + 1) * across.per); j++) {
      received = Math.max(received, head.received[j]);
    }
    const height = Math.round(tall * Math.min(1, received / most));
    const gap = across.cell > 3 * ratio ? Math.round(ratio) : 0;
    pen.fillStyle = received > most ? colours.accent : colours.bar;
    pen.fillRect(left + cell * across.cell, top - Math.round(2 * ratio) - height, across.cell - gap, height);
  }
}

function drawLabels(pen, { head, look, pair }, layout, colours) {
  const { left, top, across, down, ratio, labelled } = layout;
  const above = top - Math.round(28 * ratio); // over the bars
  const out = look.view === "out";
  const [chosenRow, chosenColumn] = out ? [look.token, pair] : [pair, look.token];
  const rows = labelled ? head.queries : null;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const write = (text, chosen, x, y, turn) => {
    pen.save();
    pen.translate(x, y);
    pen.rotate(turn);
    pen.font = `${chosen ? "600 " : ""}${Math.round(11 * ratio)}px system-ui, sans-serif`;
    pen.fillStyle = chosen ? colours.accent : colours.quiet;
    pen.fillText(text, 0, 0, 7.2 * LABEL_SIGNS * ratio);
    pen.restore();
  };
  const label = (text, index) => shortened(readTexts[text][index].label, LABEL_SIGNS);
  const rowAt = (i) => top + (Math.floor(i / down.per) + 0.5) * down.cell;
  const columnAt = (j) => left + (Math.floor(j / across.per) + 0.5) * across.cell;
  const rowTicks = rows ? Array.from({ length: rows }, (_, i) => i) : ticksOf(down, 30 * ratio);
  for (const i of rowTicks) {
    const text = labelled ? label(head.layer.queryText, i) : String(i);
    write(text, i === chosenRow, left - 5 * ratio, rowAt(i), 0);
  }
  const columnTicks = labelled ? Array.from({ length: head.keys }, (_, j) => j) : ticksOf(across, 40 * ratio);
  for (const j of columnTicks) {
    const text = labelled ? label(head.layer.keyText, j) : String(j);
    pen.textAlign = labelled ? "left" : "center";
    const y = labelled ? above : above - 6 * ratio;
    write(text, j === chosenColumn, columnAt(j), y, labelled ? -Math.PI / 2 : 0);
  }
}

/** Lines along the chosen query's row and the chosen key's column, and a frame on their pair. */
function drawCross(pen, { look, pair }, { left, top, across, down, ratio }, colours) {
  const out = look.view === "out";
  const [i, j] = out ? [look.token, pair] : [pair, look.token];
  const wide = Math.max(1, Math.round(ratio));
  pen.fillStyle = colours.accent;
  const frame = (x, y, width, height) => {
    pen.fillRect(x - wide, y - wide, width + 2 * wide, wide);
    pen.fillRect(x - wide, y + height, width + 2 * wide, wide);
    pen.fillRect(x - wide, y, wide, height);
    pen.fillRect(x + width, y, wide, height);
  };
  if (i !== null) frame(left, spanOf(down, top, i)[0], across.length, down.cell);
  if (j !== null) frame(spanOf(across, left, j)[0], top, across.cell, down.length);
}
