// ---- From a weight to a colour of the ramp.

const darkTheme = window.matchMedia("(prefers-color-scheme: dark)");

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
