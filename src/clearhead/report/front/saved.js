// ---- Files that the page saves: pictures as SVG with their words, rows as CSV, a caption.

import { draw, penOf } from "../../base/front/dom.js";
import { channels } from "../../base/front/ramp.js";
import { measuredError } from "./map_words.js";
import { isWeights } from "./meaning_words.js";
import { headName } from "./names.js";
import { countsOf, mayLook, weightOf } from "./weights.js";
import { codePoint, plural, shortened } from "./words.js";

/**
 * @import { Colours } from "../../base/front/theme.js"
 * @import { Scale } from "./colour.js"
 * @import { Page } from "./mount.js"
 * @import { Word } from "./types.d.ts"
 */

const VECTOR = 128; // up to so many tokens on a side cells are rectangles; with more, the picture is an image inside the SVG
const EXACT = 1024; // up to so many tokens on a side each pair is drawn; with more, the map as on the page
const WORDS = 160; // up to so many tokens on a side are named in a picture; with more, positions

/**
 * The caption of a picture: the model's module, layer, head, rows and columns, scale.
 *
 * @param {Page} page
 */
export function captionOf(page) {
  const { layer, head, meaning } = page.now;
  const { view } = page;
  const what = isWeights(meaning) ? "weights" : meaning.title;
  /** @type {Record<string, string>} */
  const scales = { uniform: `${what} as multiples of uniform attention under the same mask`, log: `${what}, log scale`,
    linear: `${what}, linear scale` };
  return `${page.run.title}: ${layer.kind} attention of ${headName(page, view)} (${layer.name}); ${plural(head.queries, "query")} in rows, ${plural(head.keys, "key")} in columns; ` +
    `colour: ${scales[view.scale]}${measuredError(layer)}.`;
}

/**
 * The head's map with its words, as an SVG element: rows are queries. `zoom`, [i0, i1, j0, j1]: a part of it.
 *
 * @param {Page} page
 * @param {number[] | null} [zoom]
 */
export function svgOfMap(page, zoom = null) {
  const { head, names, scale } = page.now;
  const { colours } = page.theme;
  const [i0, i1, j0, j1] = zoom ?? [0, head.queries, 0, head.keys];
  const [rows, columns] = [i1 - i0, j1 - j0];
  if (Math.max(rows, columns) > EXACT) return svgOfCanvas(page);
  const cell = Math.max(1, Math.min(16, Math.floor(1200 / Math.max(rows, columns))));
  const worded = Math.max(rows, columns) <= WORDS;
  const room = worded ? 110 : 50;
  const [width, height] = [room + columns * cell + 8, room + rows * cell + 40];
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "system-ui, sans-serif" });
  svg.append(draw("title", {}, captionOf(page)), draw("rect", { width, height, fill: colours.panel }));
  const cells = draw("g", { transform: `translate(${room} ${room})`, "shape-rendering": "crispEdges" });
  svg.append(cells);
  const counts = countsOf(head);
  /**
   * @param {number} i
   * @param {number} j
   * @returns {number | null}
   */
  const colour = (i, j) => {
    if (!mayLook(head, i, j)) return null;
    return scale.step(scale.value(weightOf(head, i, j), counts[i]));
  };
  if (Math.max(rows, columns) <= VECTOR) {
    for (let i = i0; i < i1; i++) {
      for (let j = j0; j < j1; j++) {
        const step = colour(i, j);
        const place = { x: (j - j0) * cell, y: (i - i0) * cell, width: cell, height: cell };
        cells.append(draw("rect", { ...place, fill: step === null ? colours.hatch : scale.css(step) }));
      }
    }
  } else cells.append(draw("image", { width: columns * cell, height: rows * cell, href: imageOf(rows, columns, (r, c) =>
    colour(i0 + r, j0 + c), scale, colours), "image-rendering": "pixelated" }));
  const size = Math.min(11, Math.max(6, cell));
  /**
   * @param {Word[]} words
   * @param {number} at
   */
  const word = (words, at) => (worded ? shortened(words[at].label, 16) : at);
  const every = worded ? 1 : Math.ceil(Math.max(rows, columns) / 20);
  for (let i = i0; i < i1; i += every) {
    const place = { x: room - 4, y: room + (i - i0 + 0.5) * cell, "text-anchor": "end", "dominant-baseline": "central" };
    svg.append(draw("text", { ...place, "font-size": size, fill: colours.ink }, word(names[0], i)));
  }
  for (let j = j0; j < j1; j += every) {
    const place = `translate(${room + (j - j0 + 0.5) * cell} ${room - 4}) rotate(-90)`;
    const text = { transform: place, "dominant-baseline": "central", "font-size": size, fill: colours.ink };
    svg.append(draw("text", text, word(names[1], j)));
  }
  svg.append(...legendOf(scale, colours, room, height - 28));
  return svg;
}

/**
 * The map as it stands on the page, as an image, with its scale.
 *
 * @param {Page} page
 */
function svgOfCanvas(page) {
  const { colours } = page.theme;
  const canvas = page.find("map-picture", HTMLCanvasElement);
  const { width, height } = canvas;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height + 40}`, width, height: height + 40 });
  svg.append(draw("title", {}, captionOf(page)), draw("rect", { width, height: height + 40, fill: colours.panel }),
    draw("image", { width, height, href: canvas.toDataURL() }), ...legendOf(page.now.scale, colours, 20, height + 10));
  return svg;
}

/**
 * A scale and its marks, as SVG elements.
 *
 * @param {Scale} scale
 * @param {Colours} colours
 * @param {number} x
 * @param {number} y
 */
function legendOf(scale, colours, x, y) {
  const width = 240;
  const parts = Array.from({ length: 60 }, (_, at) => draw("rect", {
    x: x + at * 4, y, width: 4.2, height: 10, fill: scale.css(Math.round((255 * at) / 59)),
  }));
  const marks = scale.ticks.map(([value, words]) => draw("text", {
    x: x + (width * scale.step(value)) / 255, y: y + 21, "font-size": 8, "text-anchor": "middle", fill: colours.ink,
  }, words));
  return [...parts, ...marks];
}

/**
 * A PNG of one pixel a cell, as a data URL. `stepAt`: the step of a cell, null where it is masked.
 *
 * @param {number} rows
 * @param {number} columns
 * @param {(row: number, column: number) => number | null} stepAt
 * @param {Scale} scale
 * @param {Colours} colours
 */
function imageOf(rows, columns, stepAt, scale, colours) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows);
  const masked = channels(colours.hatch);
  for (let r = 0, at = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++, at += 4) {
      const step = stepAt(r, c);
      for (let d = 0; d < 3; d++) image.data[at + d] = step === null ? masked[d] : scale.table[3 * step + d];
      image.data[at + 3] = 255;
    }
  }
  penOf(canvas).putImageData(image, 0, 0);
  return canvas.toDataURL();
}

/**
 * The text as it stands on the page, words and shading, as an SVG element.
 *
 * @param {Page} page
 */
export function svgOfText(page) {
  const box = page.find("texts");
  const frame = box.getBoundingClientRect();
  const { colours } = page.theme;
  const [width, height] = [Math.ceil(frame.width), Math.ceil(Math.max(...Array.from(box.querySelectorAll(".prose"),
    (one) => one.getBoundingClientRect().top - frame.top + one.scrollHeight)))];
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  svg.append(draw("title", {}, captionOf(page)), draw("rect", { width, height, fill: colours.panel }));
  for (const prose of box.querySelectorAll(".prose")) {
    for (const span of prose.querySelectorAll(".token")) {
      const style = getComputedStyle(span);
      for (const part of span.getClientRects()) {
        const [x, y] = [part.left - frame.left, part.top - frame.top + prose.scrollTop];
        const place = { x, y, width: part.width, height: part.height, rx: 3 };
        const rect = draw("rect", { ...place, fill: style.backgroundColor });
        if (span.classList.contains("chosen")) {
          rect.setAttribute("stroke", colours.accent);
          rect.setAttribute("stroke-width", "2");
        }
        svg.append(rect);
      }
      const first = span.getClientRects()[0];
      if (!first) continue;
      const inset = parseFloat(style.paddingLeft) + parseFloat(style.borderLeftWidth);
      const place = { x: first.left - frame.left + inset, y: first.bottom - frame.top + prose.scrollTop - 0.28 * first.height };
      const font = { "font-family": style.fontFamily, "font-size": style.fontSize, fill: style.color };
      svg.append(draw("text", { ...place, ...font, textLength: first.width - 2 * inset, "xml:space": "preserve" }, span.textContent));
    }
  }
  for (const part of box.querySelectorAll(".arcs > *")) {
    const copy = part.cloneNode(true);
    if (!(copy instanceof SVGElement)) continue;
    const style = getComputedStyle(part);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-linecap", "paint-order", "font", "text-anchor"]) {
      copy.style.setProperty(name, style.getPropertyValue(name));
    }
    svg.append(copy);
  }
  return svg;
}

/**
 * One field of CSV, quoted where it must be; a field that a spreadsheet would take for a formula begins with a '.
 *
 * @param {string | number | boolean} value
 */
function field(value) {
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/**
 * The weights of the chosen token, one line each.
 *
 * @param {Page} page
 */
export function csvOfRow(page) {
  const { look, head, view, meaning } = page.now;
  const words = page.run.texts[view === "out" ? page.now.layer.keyText : page.now.layer.queryText];
  /** @type {(string | number | boolean)[][]} */
  const lines = [["position", "token", isWeights(meaning) ? "weight" : meaning.title, "times_uniform", "allowed"]];
  words.forEach((word, other) => {
    const [i, j] = view === "out" ? [look.token, other] : [other, look.token];
    const weight = look.weights[other];
    lines.push([other, word, weight, weight * countsOf(head)[i], mayLook(head, i, j)]);
  });
  return lines.map((line) => `${line.map(field).join(",")}\r\n`).join("");
}

/**
 * Hands a file to the reader.
 *
 * @param {string} name
 * @param {string} text
 * @param {string} type
 */
export function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// What XML has no way to write: a name of a layer or a title may hold it.
const unfit = /[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu;

/** @param {SVGSVGElement} svg */
export const written = (svg) =>
  `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(svg).replace(unfit, codePoint)}\n`;
