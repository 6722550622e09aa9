// ---- Where things are on the map, in device pixels. No drawing here.

const SMALLEST_LABELLED = 13; // CSS pixels of a cell that a token's label fits beside
const LARGEST_CELL = 44; // CSS pixels: a text of few tokens does not fill the screen

const LABEL_SIGNS = 12; // a label is cut to this many signs

/** The most signs in a token of a text. */
const longestLabel = (words) => words.reduce((most, { label }) => Math.max(most, label.length), 0);

/** Cells along one axis of `count` tokens in `room` pixels: whole pixels a cell, whole tokens a pixel. */
function fitAxis(count, room, ratio) {
  const per = Math.ceil(count / room);
  const cells = Math.ceil(count / per);
  const cell = Math.max(1, Math.min(Math.floor(room / cells), Math.round(LARGEST_CELL * ratio)));
  return { count, per, cells, cell, length: cells * cell };
}

/** The geometry of the map of `head` in a box `width` CSS pixels wide. */
function layoutMap(head, names, width, tallest, ratio) {
  const place = (left, top) => {
    const acrossRoom = Math.max(40, Math.floor((width - left - 2) * ratio));
    const downRoom = Math.max(40, Math.floor((tallest - top) * ratio));
    const square = Math.min(acrossRoom, downRoom);
    const same = head.queries === head.keys;
    return {
      ratio,
      left: Math.round(left * ratio),
      top: Math.round(top * ratio),
      across: fitAxis(head.keys, same ? square : acrossRoom, ratio),
      down: fitAxis(head.queries, same ? square : downRoom, ratio),
    };
  };
  const room = (words) => 14 + 7.2 * Math.min(LABEL_SIGNS, longestLabel(words));
  const roomy = place(room(names[0]), 28 + room(names[1]));
  const least = SMALLEST_LABELLED * ratio;
  if (roomy.across.cell >= least && roomy.down.cell >= least) return { ...roomy, labelled: true };
  return { ...place(40, 46), labelled: false };
}

/** The cell under a point given in CSS pixels of the canvas, or null. */
function cellAt(layout, x, y) {
  const column = Math.floor((x * layout.ratio - layout.left) / layout.across.cell);
  const row = Math.floor((y * layout.ratio - layout.top) / layout.down.cell);
  const inside = column >= 0 && row >= 0 && column < layout.across.cells && row < layout.down.cells;
  return inside ? { row, column } : null;
}

/** The strongest pair of a cell, which is the pair the cell's colour shows; the first if none is allowed. */
function strongestIn(head, layout, { row, column }) {
  const { across, down } = layout;
  let best = { i: row * down.per, j: column * across.per, weight: -1 };
  for (let i = row * down.per; i < Math.min(head.queries, (row + 1) * down.per); i++) {
    for (let j = column * across.per; j < Math.min(head.keys, (column + 1) * across.per); j++) {
      const weight = mayLook(head, i, j) ? weightOf(head, i, j) : -1;
      if (weight > best.weight) best = { i, j, weight };
    }
  }
  return best;
}

/** The start and the size of the cell that holds token `index`, along an axis from `origin`. */
const spanOf = (axis, origin, index) => [origin + Math.floor(index / axis.per) * axis.cell, axis.cell];

/** Positions worth a tick: round steps at least `apart` pixels from each other. */
function ticksOf(axis, apart) {
  const least = (apart / axis.cell) * axis.per;
  let step = 1;
  for (const factor of [2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]) {
    if (step < least) step = factor;
  }
  return Array.from({ length: Math.ceil(axis.count / step) }, (_, index) => index * step);
}
