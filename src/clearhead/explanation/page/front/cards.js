// ---- One card a computed step, with the tables it is made of; inputs that stand together share a card.

import { namesIn } from "../../../base/front/language.js";
import { addressOf, choice, choose } from "./choice.js";
import { byId, data } from "./data.js";
import { formulaNow, isStale, steps, whyNow } from "./steps.js";
import { axisKey, element, tableOfStep } from "./tables.js";

export const cards = []; // {part, steps, element, views: null until it is first shown}

for (const part of data.parts) {
  for (const step of part.steps.map((one) => steps.get(one.name))) {
    const last = cards.at(-1);
    if (step.given && last?.part === part && last.steps[0].given) last.steps.push(step);
    else cards.push({ part, steps: [step], element: null, views: null });
  }
}

export const cardOf = (step) => cards.findIndex((card) => card.steps.includes(step));
export const everythingShown = () => document.documentElement.dataset.view === "all";
const visibleCards = () => cards.filter((card) => card.views && !card.element.hidden);
export const visibleViews = () => visibleCards().flatMap((card) => card.views.filter((view) => !(view.operand && everythingShown())));

/** The index of the chosen number of a step. */
export const chosenIndex = (step) =>
  step.axes.map((_, axis) => Math.min(choice.at[axisKey(step, axis)] ?? 0, step.sizes[axis] - 1));

function buildCard(card) {
  const { element: box, part, steps: own } = card;
  card.views = [];
  const add = (parent, step, operand) => {
    const view = tableOfStep(step, operand);
    view.paint();
    card.views.push(view);
    parent.append(view.figure);
    return view;
  };
  const row = element("div", own[0].given ? "inputs" : "");
  for (const step of own) {
    const column = element("div", "column");
    const text = element("div", "text");
    text.append(element("p", "formula"), element("p", "why"));
    const line = element("div", "tables");
    const operands = step.tree ? namesIn(step.tree).filter((name) => name !== step.name) : [];
    for (const name of operands) add(line, steps.get(name), true);
    const result = element("div", "result");
    if (operands.length) {
      const arrow = element("span", "arrow operand", "→");
      arrow.setAttribute("aria-hidden", "true");
      result.append(arrow);
    }
    add(result, step, false);
    line.append(result);
    column.append(text, line);
    row.append(column);
  }
  box.append(row);
  if (part.drawn && part.steps[0].name === own[0].name) {
    const drawn = element("pre", "drawn", part.drawn);
    drawn.tabIndex = 0;
    drawn.setAttribute("aria-label", "The axes of each array");
    box.append(drawn);
  }
}

/** A formula with its indices below: Σ_d as Σ and a small d. */
const typeset = (formula) => formula.split(/(?<=Σ|max)_([a-z])/).map((text, n) => (n % 2 ? element("sub", "", text) : text));

function paintCard(card) {
  if (!card.views) buildCard(card);
  else card.views.forEach((view) => view.paint());
  for (const view of card.views) view.figure.classList.toggle("stale", isStale(view.step));
  card.steps.forEach((step, n) => {
    const text = card.element.querySelectorAll(".text")[n];
    const formula = text.querySelector(".formula");
    formula.replaceChildren(...typeset(formulaNow(step) || step.name), element("span", "shape", step.shape || "one number"));
    text.querySelector(".why").textContent = (step.aside ? "For comparison. " : "") + whyNow(step);
  });
}

export function makeCards() {
  const box = byId("cards");
  const list = byId("steps");
  let part = null;
  cards.forEach((card, n) => {
    card.element = element("section", "card");
    card.element.id = `card-${n}`;
    if (card.part !== part) {
      part = card.part;
      const group = element("li");
      group.append(element("span", "quiet", part.title.split(":")[0]), element("ol"));
      list.append(group);
    }
    const heading = element("h2", "", part.title);
    heading.tabIndex = -1;
    card.element.append(heading);
    card.element.setAttribute("aria-label", `${part.title}: ${card.steps.map((step) => step.name).join(", ")}`);
    box.append(card.element);
    const item = element("li");
    card.link = element("a", card.steps[0].aside ? "aside" : "", card.steps.map((step) => step.name).join(", "));
    card.link.href = addressOf({ ...choice, step: card.steps[0].name });
    item.append(card.link);
    list.lastChild.lastChild.append(item);
  });
}

/** Shows the chosen card, or all of them with the chosen one marked. */
export function showCards() {
  const chosen = cardOf(steps.get(choice.step));
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
  byId("previous").disabled = chosen === 0;
  byId("next").disabled = chosen === cards.length - 1;
}

export function stepBy(by, withFocus = false) {
  const now = cardOf(steps.get(choice.step));
  const next = Math.min(cards.length - 1, Math.max(0, now + by));
  if (next === now) return;
  choose({ step: cards[next].steps[0].name });
  const { element: box } = cards[next];
  if (everythingShown()) box.scrollIntoView({ block: "nearest" });
  if (withFocus) box.querySelector(".result td.cell[tabindex='0']")?.focus();
}
