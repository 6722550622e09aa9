// ---- The text itself: choose a token in it, see what it looks at shaded.

class TextPane {
  constructor(page) {
    this.page = page;
    this.holds = ""; // which texts the pane holds now
    this.listings = []; // one for a text that looks at itself, two (query, key) for cross attention
  }

  build(layer) {
    const single = oneText(layer);
    const wanted = `${layer.queryText} ${layer.keyText} ${single}`;
    if (wanted === this.holds) return;
    this.holds = wanted;
    this.listings = single
      ? [{ side: "both", text: layer.queryText, title: "text" }]
      : [
        { side: "query", text: layer.queryText, title: "text that looks (queries)" },
        { side: "key", text: layer.keyText, title: "text looked at (keys)" },
      ];
    const box = this.page.find("texts");
    box.replaceChildren();
    for (const listing of this.listings) {
      if (!single) box.append(make("h3", "", listing.title));
      listing.element = this.listing(listing);
      box.append(listing.element);
    }
  }

  listing(listing) {
    const { page } = this;
    const element = make("div", "prose");
    element.setAttribute("role", "listbox");
    element.setAttribute("aria-label", `${listing.title}: arrow keys choose a token`);
    element.dir = "auto";
    element.lang = "";
    listing.spans = page.texts[listing.text].map((token, index) => {
      const span = make("span", token.special ? "token special" : "token", token.prose);
      span.setAttribute("role", "option");
      span.tabIndex = -1;
      span.dataset.index = index;
      if (token.gap && index > 0) element.append(" ");
      element.append(span);
      if (token.ends) element.append(make("br"));
      return span;
    });
    const take = (index, step) => {
      const view = { query: "out", key: "in", both: page.view.view }[listing.side];
      page.choose({ view, token: index, pair: null }, step);
    };
    const at = (event) => event.target.closest?.(".token");
    element.addEventListener("click", (event) => at(event) && take(Number(at(event).dataset.index), true));
    element.addEventListener("pointermove", (event) => {
      const span = at(event);
      page.hover(span ? this.previewed(listing, Number(span.dataset.index)) : null);
    });
    element.addEventListener("pointerleave", () => page.hover(null));
    element.addEventListener("keydown", (event) => {
      const from = listing.spans.indexOf(page.root.activeElement);
      if (from < 0) return;
      const chosen = event.key === "Enter" || event.key === " ";
      const to = chosen ? from : stepTo(event.key, from, listing.spans);
      if (to < 0) return;
      event.preventDefault();
      listing.spans[to].tabIndex = 0;
      listing.spans[to].focus();
      take(to, chosen);
    });
    return element;
  }

  /** The pair that a token under the pointer names: with the chosen token where that is on the other side. */
  previewed({ side }, index) {
    const { view, look } = this.page.shown;
    const out = view === "out";
    const other = side === "both" || (side === "query") !== out;
    if (!other) return out ? { i: index, j: null } : { i: null, j: index };
    return out ? { i: look.token, j: index } : { i: index, j: look.token };
  }

  paint(shown) {
    const { head, look, pair, scale, names, layer } = shown;
    this.build(layer);
    const out = look.view === "out";
    for (const { side, spans } of this.listings) {
      const holdsToken = side === "both" || (side === "query") === out;
      const holdsOthers = side === "both" || (side === "query") !== out;
      spans.forEach((span, index) => {
        const isToken = holdsToken && index === look.token;
        const [i, j] = out ? [look.token, index] : [index, look.token];
        const weight = holdsOthers ? look.weights[index] : 0;
        const shaded = holdsOthers && weight > equalShare(head, i);
        const step = shaded ? scale.step(scale.value(weight, countsOf(head)[i])) : 0;
        span.style.backgroundColor = shaded ? scale.css(step) : "";
        span.style.color = shaded ? scale.ink(step) : "";
        span.classList.toggle("chosen", isToken);
        span.classList.toggle("pair", holdsOthers && index === pair);
        span.setAttribute("aria-selected", String(isToken));
        span.tabIndex = isToken ? 0 : -1;
        const words = mayLook(head, i, j) ? percent(weight) : "masked";
        span.title = holdsOthers ? `${pairName(names, i, j)} ${words}` : "";
      });
      if (!holdsToken) spans[pair === null ? 0 : pair].tabIndex = 0;
    }
    const holding = this.listings.find(({ side }) => side === "both" || (side === "query") === out);
    revealIn(holding.element, holding.spans[look.token]);
    const name = nameOf(names[out ? 0 : 1], look.token);
    this.page.find("prose-title").textContent = out ? `Where “${name}” looks` : `What looks at “${name}”`;
    const seen = countsOf(head)[look.token];
    this.page.find("prose-note").textContent = !out
      ? "Shaded: tokens that give it more than the equal share of their attention."
      : seen === 0 ? "It may look at nothing."
        : `Shaded: more than the equal share, 1/${seen} = ${percent(1 / seen)}.`;
  }

  hover(pair) {
    for (const { side, spans } of this.listings) {
      const at = pair === null ? null : this.page.view.view === "out" ? pair.j : pair.i;
      const own = pair === null ? null : this.page.view.view === "out" ? pair.i : pair.j;
      const out = this.page.view.view === "out";
      spans.forEach((span, index) => {
        const other = side === "both" || (side === "query") !== out;
        span.classList.toggle("passing", (other && index === at) || ((!other || side === "both") && index === own));
      });
    }
  }
}
