// ---- What is drawn around the map: bars, words, and the cross of a pair.

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

function drawLabels(pen, { head, names }, { i: chosenRow, j: chosenColumn }, layout, colours) {
  const { left, top, across, down, ratio, labelled } = layout;
  const above = top - Math.round(28 * ratio); // over the bars
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
  const label = (words, index) => shortened(words[index].label, LABEL_SIGNS);
  const rowAt = (i) => top + (Math.floor(i / down.per) + 0.5) * down.cell;
  const columnAt = (j) => left + (Math.floor(j / across.per) + 0.5) * across.cell;
  const rowTicks = rows ? Array.from({ length: rows }, (_, i) => i) : ticksOf(down, 30 * ratio);
  for (const i of rowTicks) {
    const text = labelled ? label(names[0], i) : String(i);
    write(text, i === chosenRow, left - 5 * ratio, rowAt(i), 0);
  }
  const columnTicks = labelled ? Array.from({ length: head.keys }, (_, j) => j) : ticksOf(across, 40 * ratio);
  for (const j of columnTicks) {
    const text = labelled ? label(names[1], j) : String(j);
    pen.textAlign = labelled ? "left" : "center";
    const y = labelled ? above : above - 6 * ratio;
    write(text, j === chosenColumn, columnAt(j), y, labelled ? -Math.PI / 2 : 0);
  }
}

/** Lines along the chosen query's row and the chosen key's column, and a frame on their pair. */
function drawCross(pen, { i, j }, { left, top, across, down, ratio }, colours) {
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
