// ---- The text itself: choose a token in it, see what it looks at shaded.

let shownTexts = ""; // which texts the pane holds now
let listings = []; // one for a text that looks at itself, two (query, key) for cross attention

/** Does one text look at itself, so that one reading serves both sides? */
const oneText = (layer) => layer.kind === "self" && layer.queryText === layer.keyText;

function buildProse(layer, choose) {
  const single = oneText(layer);
  const wanted = `${layer.queryText} ${layer.keyText} ${single}`;
  if (wanted === shownTexts) return;
  shownTexts = wanted;
  listings = single
    ? [{ side: "both", text: layer.queryText, title: "text" }]
    : [
      { side: "query", text: layer.queryText, title: "text that looks (queries)" },
      { side: "key", text: layer.keyText, title: "text looked at (keys)" },
    ];
  const box = byId("texts");
  box.replaceChildren();
  for (const listing of listings) {
    if (!single) box.append(make("h3", "", listing.title));
    listing.element = buildListing(listing, choose);
    box.append(listing.element);
  }
}

function buildListing(listing, choose) {
  const element = make("div", "prose");
  element.setAttribute("role", "listbox");
  element.setAttribute("aria-label", `${listing.title}: arrow keys choose a token`);
  element.dir = "auto";
  element.lang = "";
  listing.spans = readTexts[listing.text].map((token, index) => {
    const span = make("span", token.special ? "token special" : "token", token.prose);
    span.setAttribute("role", "option");
    span.tabIndex = -1;
    span.dataset.index = index;
    if (token.gap && index > 0) element.append(" ");
    element.append(span);
    if (token.ends) element.append(make("br"));
    return span;
  });
  const take = (index) => {
    if (listing.side === "query") choose({ view: "out", token: index, pair: null });
    else if (listing.side === "key") choose({ view: "in", token: index, pair: null });
    else choose({ token: index, pair: null });
  };
  element.addEventListener("click", (event) => {
    const span = event.target.closest(".token");
    if (span) take(Number(span.dataset.index));
  });
  element.addEventListener("keydown", (event) => {
    const from = listing.spans.indexOf(document.activeElement);
    if (from < 0) return;
    const chosen = event.key === "Enter" || event.key === " ";
    const to = chosen ? from : stepTo(event.key, from, listing.spans);
    if (to < 0) return;
    event.preventDefault();
    listing.spans[to].tabIndex = 0;
    listing.spans[to].focus();
    take(to);
  });
  return element;
}

/** Shades each token by its weight, where that is above the equal share; marks the pair. */
function paintProse({ head, look, pair, table, scale, floor }) {
  const { layer } = head;
  const out = look.view === "out";
  for (const { side, spans } of listings) {
    const holdsToken = side === "both" || (side === "query") === out;
    const holdsOthers = side === "both" || (side === "query") !== out;
    spans.forEach((span, index) => {
      const isToken = holdsToken && index === look.token;
      const [i, j] = out ? [look.token, index] : [index, look.token];
      const weight = holdsOthers ? look.weights[index] : 0;
      const shaded = holdsOthers && weight > equalShare(head, i);
      const step = shaded ? stepOf(weight, scale, floor) : 0;
      span.style.backgroundColor = shaded ? cssColour(table, step) : "";
      span.style.color = shaded ? inkOn(table, step) : "";
      span.classList.toggle("chosen", isToken);
      span.classList.toggle("pair", holdsOthers && index === pair);
      span.setAttribute("aria-selected", String(isToken));
      span.tabIndex = isToken ? 0 : -1;
      const words = mayLook(head, i, j) ? percent(weight) : "masked";
      span.title = holdsOthers ? `${pairName(layer, i, j)} ${words}` : "";
    });
    if (!holdsToken) spans[pair === null ? 0 : pair].tabIndex = 0;
  }
  const holding = listings.find(({ side }) => side === "both" || (side === "query") === out);
  revealIn(holding.element, holding.spans[look.token]);
  const name = nameOf(out ? layer.queryText : layer.keyText, look.token);
  byId("prose-title").textContent = out ? `Where “${name}” looks` : `What looks at “${name}”`;
  const seen = countsOf(head)[look.token];
  byId("prose-note").textContent = !out
    ? "Shaded: tokens that give it more than the equal share of their attention."
    : seen === 0 ? "It may look at nothing."
      : `Shaded: more than the equal share, 1/${seen} = ${percent(1 / seen)}.`;
}

/** "A → B", the query first. */
const pairName = (layer, i, j) => `${nameOf(layer.queryText, i)} → ${nameOf(layer.keyText, j)}`;
