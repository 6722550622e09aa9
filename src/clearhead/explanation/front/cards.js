// ---- One card for each computed step, with the tables it is made of. Inputs that stand together share a card.

import { everyIn, firstIn, isPlainClick, make } from "../../base/front/dom.js";
import { namesIn } from "../../base/front/language.js";
import { addressOf, choice, choose } from "./choice.js";
import { byId } from "./data.js";
import { editable, formulaNow, isStale, parts, stepOf, steps, whyNow } from "./steps.js";
import { axisKey, tableOfStep } from "./tables.js";

/** @import { Card, Part, Step, TableView } from "./types.d.ts" */

/** @type {Card[]} */
export const cards = [];

for (const part of parts) {
  for (const step of part.steps) {
    const last = cards.at(-1);
    if (step.given && last?.part === part && last.steps[0].given) last.steps.push(step);
    else cards.push({ part, steps: [step], element: make("section", "card"), link: make("a"), views: null });
  }
}

/** @param {Step} step */
export const cardOf = (step) => cards.findIndex((card) => card.steps.includes(step));
export const everythingShown = () => document.documentElement.dataset.view === "all";
const visibleCards = () => cards.filter((card) => card.views && !card.element.hidden);
export const visibleViews = () => visibleCards().flatMap((card) => (card.views ?? []).filter((view) => !(view.operand && everythingShown())));

/**
 * The index of the chosen number of a step.
 *
 * @param {Step} step
 */
export const chosenIndex = (step) =>
  step.axes.map((_, axis) => Math.min(choice.at[axisKey(step, axis)] ?? 0, step.sizes[axis] - 1));

/**
 * What is drawn at the head of a part: a table of axes, where one stands before an empty line, and sentences, which wrap.
 *
 * @param {string} text
 */
function drawnOf(text) {
  const drawn = make("div", "drawn");
  const [table, sentences] = text.includes("\n\n") ? text.split("\n\n", 2) : ["", text];
  if (table) {
    const axes = make("pre", "", table);
    axes.tabIndex = 0;
    axes.setAttribute("aria-label", "The axes of each array");
    drawn.append(axes);
  }
  for (const line of sentences.split("\n")) drawn.append(make("p", "", line));
  return drawn;
}

const FOLLOW = ["weights", "output"]; // the steps that are shown below inputs, as they are now

/** @param {Card} card */
function buildCard(card) {
  const { element: box, part, steps: own } = card;
  /** @type {TableView[]} */
  const views = [];
  card.views = views;
  /**
   * @param {HTMLElement} parent
   * @param {Step} step
   * @param {boolean} operand
   */
  const add = (parent, step, operand) => {
    const view = tableOfStep(step, operand);
    view.paint();
    views.push(view);
    parent.append(view.figure);
    return view;
  };
  const row = make("div", own[0].given ? "inputs" : "");
  for (const step of own) {
    const column = make("div", "column");
    const text = make("div", "text");
    text.append(make("p", "formula"), make("p", "why"));
    const line = make("div", "tables");
    const operands = step.tree ? namesIn(step.tree).filter((name) => name !== step.name) : [];
    for (const name of operands) add(line, stepOf(name), true);
    const result = make("div", "result");
    if (operands.length) {
      const arrow = make("span", "arrow operand", "→");
      arrow.setAttribute("aria-hidden", "true");
      result.append(arrow);
    }
    add(result, step, false);
    line.append(result);
    column.append(text, line);
    row.append(column);
  }
  box.append(row);
  const follow = own.some(editable) ? FOLLOW.flatMap((name) => steps.get(name) ?? []).filter((step) => step.tree) : [];
  if (follow.length) {
    const live = make("div", "live operand");
    const line = make("div", "tables");
    live.append(make("p", "quiet", "What follows from these inputs:"), line);
    for (const step of follow) add(line, step, true);
    row.append(live);
  }
  if (part.drawn && part.steps[0].name === own[0].name) {
    box.append(drawnOf(part.drawn));
  }
}

/**
 * A formula with its indices below: Σ_d as Σ and a small d.
 *
 * @param {string} formula
 */
const typeset = (formula) => formula.split(/(?<=Σ|max)_([a-z])/).map((text, n) => (n % 2 ? make("sub", "", text) : text));

/** @param {Card} card */
function paintCard(card) {
  if (!card.views) buildCard(card);
  else card.views.forEach((view) => view.paint());
  for (const view of card.views ?? []) view.figure.classList.toggle("stale", isStale(view.step));
  card.steps.forEach((step, n) => {
    const text = card.element.querySelectorAll(".text")[n];
    const formula = firstIn(text, ".formula", HTMLElement);
    formula.replaceChildren(...typeset(formulaNow(step) || step.name), make("span", "shape", step.shape || "one number"));
    firstIn(text, ".why", HTMLElement).textContent = (step.aside ? "For comparison. " : "") + whyNow(step);
  });
}

export function makeCards() {
  const box = byId("cards");
  const list = byId("steps");
  /** @type {Part | null} */
  let part = null;
  let group = make("ol");
  cards.forEach((card, n) => {
    card.element.id = `card-${n}`;
    if (card.part !== part) {
      part = card.part;
      group = make("ol");
      const own = make("li");
      own.append(make("span", "quiet", part.title.split(":")[0]), group);
      list.append(own);
    }
    const heading = make("h2", "", part.title);
    heading.tabIndex = -1;
    card.element.append(heading);
    card.element.setAttribute("aria-label", `${part.title}: ${card.steps.map((step) => step.name).join(", ")}`);
    box.append(card.element);
    const item = make("li");
    card.link.className = card.steps[0].aside ? "aside" : "";
    card.link.textContent = card.steps.map((step) => step.name).join(", ");
    card.link.href = addressOf({ ...choice, step: card.steps[0].name });
    card.link.addEventListener("click", (event) => {
      if (!isPlainClick(event)) return;
      event.preventDefault(); // in a frame "#…" is an address of the document around it
      openCard(n);
    });
    item.append(card.link);
    group.append(item);
  });
}

/** Shows the chosen card, or all of them with the chosen one marked. */
export function showCards() {
  const chosen = cardOf(stepOf(choice.step));
  cards.forEach((card, n) => {
    card.element.hidden = n !== chosen && !everythingShown();
    card.element.classList.toggle("chosen", n === chosen);
    if (n === chosen) card.link.setAttribute("aria-current", "step");
    else card.link.removeAttribute("aria-current");
    if (!card.element.hidden) paintCard(card);
  });
  const list = byId("steps");
  const { link } = cards[chosen];
  list.scrollLeft += link.getBoundingClientRect().left - list.getBoundingClientRect().left - list.clientWidth / 3;
  byId("count").textContent = `step ${chosen + 1} of ${cards.length}`;
  byId("previous", HTMLButtonElement).disabled = chosen === 0;
  byId("next", HTMLButtonElement).disabled = chosen === cards.length - 1;
}

/** @param {number} n */
function openCard(n) {
  choose({ step: cards[n].steps[0].name });
  if (everythingShown()) cards[n].element.scrollIntoView({ block: "nearest" });
}

/**
 * @param {number} by
 * @param {boolean} [withFocus]
 */
export function stepBy(by, withFocus = false) {
  const now = cardOf(stepOf(choice.step));
  const next = Math.min(cards.length - 1, Math.max(0, now + by));
  if (next === now) return;
  openCard(next);
  if (withFocus) everyIn(cards[next].element, ".result td.cell[tabindex='0']", HTMLElement)[0]?.focus();
}
