// ---- From a weight to a colour. More weight is always further from the background.

const darkTheme = window.matchMedia("(prefers-color-scheme: dark)");

const ramps = {
  light: ["#ffffff", "#e6f2d5", "#b9dfc3", "#63b8b6", "#2b7fae", "#1c4790", "#10184a"],
  dark: ["#1a1f28", "#1c3a5e", "#1d5f86", "#25899a", "#4fb88c", "#a5d76e", "#f8f3b4"],
};

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** 256 colours, three bytes each, evenly between the stops. */
function tableOf(stops) {
  const table = new Uint8ClampedArray(256 * 3);
  const colours = stops.map(channels);
  for (let step = 0; step < 256; step++) {
    const at = (step / 255) * (colours.length - 1);
    const low = Math.min(Math.floor(at), colours.length - 2);
    for (let c = 0; c < 3; c++) {
      table[3 * step + c] = colours[low][c] + (at - low) * (colours[low + 1][c] - colours[low][c]);
    }
  }
  return table;
}

const tables = { light: tableOf(ramps.light), dark: tableOf(ramps.dark) };

/** The colours of the theme for canvases, which know no CSS. */
function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    table: darkTheme.matches ? tables.dark : tables.light,
    ink: read("--ink"), quiet: read("--quiet"), line: read("--line"),
    accent: read("--accent"), bar: read("--bar"), hatch: read("--hatch"), panel: read("--panel"),
  };
}

/** The step of 0 to 255 for a weight. The log scale starts at a tenth of the equal share, 0.1/N. */
function stepOf(weight, scale, floor) {
  const share = scale === "log" ? 1 - Math.log(weight) / Math.log(floor) : weight;
  return Math.round(255 * Math.min(1, Math.max(0, share)));
}

const floorOf = (count) => 0.1 / count;

/** Black or white, whichever reads better on this step: always at least 4.5 to 1. */
function inkOn(table, step) {
  const [r, g, b] = [0, 1, 2].map((c) => {
    const value = table[3 * step + c] / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

const cssColour = (table, step) => `rgb(${table[3 * step]} ${table[3 * step + 1]} ${table[3 * step + 2]})`;

/** A pattern of slanted lines, for pairs that are not allowed. */
function hatching(context, colours, ratio) {
  const size = Math.round(6 * ratio);
  const tile = document.createElement("canvas");
  tile.width = size;
  tile.height = size;
  const pen = tile.getContext("2d");
  pen.fillStyle = colours.panel;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = colours.hatch;
  pen.lineWidth = ratio;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}
