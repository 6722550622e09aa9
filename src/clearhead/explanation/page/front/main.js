// ---- What is chosen, and the one way it changes: choose() some of it, then the page is painted.
//
// `step`: the name of the step whose card is shown. `of`: that of the step whose number is written out. `at`: the
// place of that number by the names of its axes. All of it stands in the address, so that a link leads to it.

let choice = null;

const firstAt = () => Object.fromEntries(["B", "H", "Lq", "Lk"].map((axis, n) => [axis, data.pair[n]]));

function addressOf({ step, of, at }) {
  const places = Object.entries(at).filter(([, n]) => n).map(([axis, n]) => `${axis}.${n}`);
  const parts = [["step", step], ...(of && of !== step ? [["of", of]] : []), ["at", places.join("_")]];
  return `#${new URLSearchParams(parts)}`;
}

/** What the address names; anything in it that does not exist is left out. */
function readAddress() {
  const parts = new URLSearchParams(window.location.hash.slice(1));
  const named = (name) => (steps.has(parts.get(name)) ? parts.get(name) : null);
  const step = named("step") ?? cards[0].steps[0].name;
  const at = parts.has("at") ? {} : firstAt();
  for (const [, axis, n] of (parts.get("at") ?? "").matchAll(/([A-Za-z]\w{0,20}?)\.(\d{1,6})(?:_|$)/g)) at[axis] = Number(n);
  for (const axis of ["B", "H"]) at[axis] = Math.min(at[axis] ?? 0, data.labels[axis].length - 1);
  return { step, of: named("of") ?? step, at };
}

function writeAddress(asNew) {
  const address = addressOf(choice);
  if (address === window.location.hash) return;
  try {
    window.history[asNew ? "pushState" : "replaceState"](null, "", address);
  } catch {
    // A page inside another document may not change its address: it works without.
  }
}

function choose(what) {
  const before = choice.step;
  choice = { ...choice, ...what };
  if (what.step && !what.of) choice.of = what.step;
  writeAddress(choice.step !== before);
  refresh();
}

function stepBy(by, withFocus = false) {
  const now = cardOf(steps.get(choice.step));
  const next = Math.min(cards.length - 1, Math.max(0, now + by));
  if (next === now) return;
  choose({ step: cards[next].steps[0].name });
  const { element: box } = cards[next];
  if (everythingShown()) box.scrollIntoView({ block: "nearest" });
  if (withFocus) box.querySelector(".result td.cell[tabindex='0']")?.focus();
}

/** Writes out the chosen number. */
function showChosen() {
  const step = steps.get(choice.of);
  showNumber(step, chosenIndex(step));
}

/** In each table one cell is reached by Tab: the one that the choice names. */
function placeTabs() {
  for (const view of visibleViews()) {
    const flat = view.cells.flat();
    for (const cell of flat) cell.tabIndex = -1;
    (view.cellAt(chosenIndex(view.step)) ?? flat[0]).tabIndex = 0;
  }
}

function refresh() {
  say("");
  showCards();
  paintControls();
  placeTabs();
  showChosen();
  for (const card of cards) card.link.href = addressOf({ step: card.steps[0].name, at: choice.at });
  document.documentElement.dataset.shown = choice.step;
}

const say = (text) => { byId("said").textContent = text; };

/**
 * For tests and for the console; all of it only reads. `numbers(name)` are those of a step as the page has them,
 * `computed(name)` what the page makes of the steps before it;
 * `sentence(name, index)` is one of them written out; `obstacle` is why the page can't compute, and `unknown(tree)`
 * which operations of a tree it lacks.
 */
function offerHooks() {
  const plain = (all) => Array.from(all, (x) => (Number.isFinite(x) ? x : String(x)));
  window.clearhead = Object.freeze({
    obstacle,
    names: () => [...steps.keys()],
    sizes: (name) => [...steps.get(name).sizes],
    numbers: (name) => plain(steps.get(name).numbers),
    computed: (name) => plain(allNumbers(steps.get(name).made ?? steps.get(name).node)),
    sentence: (name, index) => plainText(sentenceOf(steps.get(name), index)),
    unknown: (tree) => callsIn(tree).filter((name) => !Object.hasOwn(operations, name)),
    change: () => ({ scale: change.scale, temperature: change.temperature }),
  });
}

function main() {
  byId("page").hidden = false;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light"); // nothing is chosen yet, and nothing painted
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.documentElement.dataset.view = "one";
  choice = readAddress();
  makeCards();
  makeControls();
  listen();
  followPrinting();
  for (const event of ["hashchange", "popstate"]) {
    window.addEventListener(event, () => {
      choice = readAddress();
      refresh();
    });
  }
  offerHooks();
  refresh();
}

main();
