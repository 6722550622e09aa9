// ---- A picture that moves: frames of the same shapes, which the reader plays, steps through, or draws along.
//
// Nothing plays by itself. Between two frames an attribute moves where its values differ in their numbers alone; all else
// changes halfway. For readers who want less motion, one frame follows another.

import { draw, elementIn, withModifier } from "../../base/front/dom.js";
import { Theme } from "../../base/front/theme.js";

/** @import { MotionData, Moving } from "./types.d.ts" */

const GLIDE = 700; // milliseconds from one frame to the next
const NUMBER = /-?\d+(?:\.\d+)?/g;

/**
 * @template {Element} [Kind=HTMLElement]
 * @param {string} id
 * @param {new () => Kind} [kind]
 */
const byId = (id, kind) => elementIn(document, id, kind);

/** @type {MotionData} */
const data = JSON.parse(byId("data").textContent);
const last = data.words.length - 1;
const less = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * What a value is between two frames: `share` of the way from the frame `from` to the frame `to`.
 *
 * @param {string[]} values one for each frame
 * @returns {(from: number, to: number, share: number) => string}
 */
function between(values) {
  const parts = values[0].split(NUMBER);
  if (values.some((value) => value.split(NUMBER).join("#") !== parts.join("#"))) {
    return (from, to, share) => values[share < 0.5 ? from : to];
  }
  const numbers = values.map((value) => (value.match(NUMBER) ?? []).map(Number));
  return (from, to, share) =>
    parts.reduce((text, part, n) => {
      const [a, b] = [numbers[from][n - 1], numbers[to][n - 1]];
      return `${text}${Math.round(1000 * (a + share * (b - a))) / 1000}${part}`;
    });
}

/**
 * The element of a shape, and the functions that set what differs from frame to frame.
 *
 * @param {Moving} shape
 */
function made({ tag, attributes, text }) {
  const element = draw(tag, {}, typeof text === "string" ? text : text[0]);
  /** @type {((from: number, to: number, share: number) => void)[]} */
  const setters = [];
  for (const [name, values] of Object.entries(attributes)) {
    if (typeof values === "string") {
      element.setAttribute(name, values);
    } else {
      const value = between(values);
      setters.push((from, to, share) => element.setAttribute(name, value(from, to, share)));
    }
  }
  if (typeof text !== "string") {
    setters.push((from, to, share) => { element.textContent = text[share < 0.5 ? from : to]; });
  }
  return { element, setters };
}

const shapes = data.shapes.map(made);
const picture = draw("svg", { viewBox: `0 0 360 ${data.height}`, role: "img" });
picture.append(...shapes.map(({ element }) => element));

/** The frame that is shown, or that the picture moves to. */
let at = 0;
let moving = 0; // the number of the next animation frame
let waiting = 0; // the timer of the next frame while the page plays
let playing = false;

/**
 * @param {number} from
 * @param {number} to
 * @param {number} share
 */
function paint(from, to, share) {
  for (const { setters } of shapes) for (const set of setters) set(from, to, share);
}

/**
 * Shows a frame: by moving there where it is the one before or after.
 *
 * @param {number} to
 * @param {boolean} glide
 */
function go(to, glide) {
  cancelAnimationFrame(moving);
  const from = at;
  at = Math.max(0, Math.min(last, to));
  const range = byId("at", HTMLInputElement);
  range.value = String(at);
  range.setAttribute("aria-valuetext", `${at + 1} of ${last + 1}`);
  byId("count").textContent = `${at + 1} / ${last + 1}`;
  byId("words").textContent = data.words[at];
  picture.setAttribute("aria-label", data.words[at]);
  byId("previous", HTMLButtonElement).disabled = at === 0;
  byId("next", HTMLButtonElement).disabled = at === last;
  document.documentElement.dataset.shown = "";
  if (!glide || less.matches || Math.abs(at - from) !== 1) {
    arrive();
    return;
  }
  /** @type {number | null} */
  let began = null;
  /** @param {number} now */
  const step = (now) => {
    began ??= now;
    const share = (now - began) / GLIDE;
    if (share >= 1) {
      arrive();
    } else {
      paint(from, at, share * share * (3 - 2 * share));
      moving = requestAnimationFrame(step);
    }
  };
  moving = requestAnimationFrame(step);
}

/** The picture is that of the frame; while the page plays, the next one follows after a pause. */
function arrive() {
  paint(at, at, 0);
  document.documentElement.dataset.shown = String(at);
  clearTimeout(waiting);
  if (!playing) return;
  if (at === last) play(false);
  else waiting = window.setTimeout(() => go(at + 1, true), 1000 * data.pause + (less.matches ? GLIDE : 0));
}

/** @param {boolean} on */
function play(on) {
  playing = on;
  clearTimeout(waiting);
  byId("play").textContent = on ? "pause" : "play";
  if (on) go(at === last ? 0 : at + 1, true);
}

/**
 * What the reader does: it stops what plays.
 *
 * @param {number} to
 * @param {boolean} glide
 */
function choose(to, glide) {
  play(false);
  go(to, glide);
}

/** @type {Record<string, () => number>} */
const KEYS = { ArrowRight: () => at + 1, ArrowLeft: () => at - 1, Home: () => 0, End: () => last };

function main() {
  const theme = new Theme(document.documentElement, () => nameTheme());
  const nameTheme = () => { byId("theme").textContent = theme.dark ? "light" : "dark"; };
  for (const id of ["stage", "player", "theme"]) byId(id).hidden = false;
  byId("still").hidden = true;
  byId("drawing").append(picture);
  byId("theme").addEventListener("click", () => theme.turn());
  byId("play").addEventListener("click", () => play(!playing));
  byId("previous").addEventListener("click", () => choose(at - 1, true));
  byId("next").addEventListener("click", () => choose(at + 1, true));
  byId("at", HTMLInputElement).addEventListener("input", (event) => {
    if (event.target instanceof HTMLInputElement) choose(Number(event.target.value), false);
  });
  document.addEventListener("keydown", (event) => {
    if (withModifier(event) || event.target instanceof HTMLInputElement || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    choose(KEYS[event.key](), true);
  });
  nameTheme();
  go(0, false);
}

main();
