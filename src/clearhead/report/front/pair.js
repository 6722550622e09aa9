// ---- One pair, why it has its weight, and the strongest others.

const LISTED = 8;

/** "rank 3 of 120, 4.3 × the equal share", for the other token of a look. */
function placeOf(look, other) {
  const i = look.view === "out" ? look.token : other;
  const j = look.view === "out" ? other : look.token;
  if (!mayLook(look.head, i, j)) return "masked: may not look";
  const weight = look.weights[other];
  const ratio = times(weight / equalShare(look.head, i));
  return `rank ${rankOf(look, other)} of ${look.ranked.length}` +
    `${look.view === "out" ? "" : " lookers"}, ${ratio} the equal share`;
}

class PairPane {
  constructor(page) {
    this.page = page;
    this.waiting = 0;
  }

  paint(shown) {
    const { head, look, pair, i, j, names } = shown;
    const byId = (id) => this.page.find(id);
    const out = look.view === "out";
    const name = nameOf(names[out ? 0 : 1], look.token);
    byId("strongest-title").hidden = look.ranked.length === 0;
    byId("strongest-title").textContent =
      `Strongest ${out ? "keys of" : "lookers at"} “${name}”`;
    if (pair === null) {
      byId("pair-title").textContent = `“${name}”`;
      byId("pair-place").textContent = out
        ? "It may look at no key: all its weights are 0."
        : "No query may look at it: all its weights are 0.";
      byId("sum").tBodies[0].replaceChildren();
    } else {
      const weight = mayLook(head, i, j) ? percent(look.weights[pair]) : "masked";
      byId("pair-title").textContent = `“${nameOf(names[0], i)}” → “${nameOf(names[1], j)}” ${weight}`;
      byId("pair-place").textContent = placeOf(look, pair);
      this.paintSum(head, i, j);
    }
    this.paintStrongest(shown);
    this.paintFacts(shown);
  }

  /** The steps of the weight; those of a long row when nothing else has been chosen for a moment. */
  paintSum(head, i, j) {
    clearTimeout(this.waiting);
    const target = this.page.find("sum").tBodies[0];
    const { run } = this.page;
    if (head.keys <= LONG || head.why?.row === i) {
      paintWhy(head, i, j, run, target);
    } else {
      target.replaceChildren();
      this.waiting = setTimeout(() => paintWhy(head, i, j, run, target), 250);
    }
  }

  paintStrongest({ look, pair, names }) {
    const out = look.view === "out";
    const text = names[out ? 1 : 0];
    const shown = look.ranked.slice(0, LISTED);
    const list = this.page.find("strongest");
    const hadFocus = list.contains(this.page.root.activeElement);
    list.replaceChildren(...shown.map((other) => {
      const button = make("button", "other");
      button.type = "button";
      button.title = `weight ${look.weights[other].toPrecision(9)}`;
      if (other === pair) button.setAttribute("aria-current", "true");
      const label = make("span", "name");
      label.append(make("bdi", "", text[other].label), make("span", "at", ` ${other}`));
      const bar = make("span", "bar");
      const fill = make("span");
      fill.style.width = `${(100 * look.weights[other]) / (look.weights[shown[0]] || 1)}%`;
      bar.append(fill);
      button.append(label, bar, make("span", "share", percent(look.weights[other])));
      button.addEventListener("click", () => this.page.choose({ pair: other }));
      const item = make("li");
      item.append(button);
      return item;
    }));
    if (hadFocus) (list.querySelector("[aria-current]") || list.querySelector("button"))?.focus();
    const rest = look.ranked.length - shown.length;
    if (rest > 0) {
      const left = look.sum - shown.reduce((sum, other) => sum + look.weights[other], 0);
      const share = Math.max(0, left);
      const words = out ? percent(share) : `${percent(share / rest)} each on average`;
      list.append(make("li", "rest", `the other ${rest.toLocaleString("en")}: ${words}`));
    }
  }

  paintFacts({ head, look, layer }) {
    const at = look.token;
    const facts = [];
    const seen = countsOf(head)[at];
    if (look.view === "out" && seen > 0) {
      facts.push(["may look at", `${plural(seen, "key")}, equal share ${percent(1 / seen)}`]);
      const entropy = entropyOf(look);
      const alike = Number(Math.exp(entropy).toPrecision(2));
      facts.push(["spread", `entropy ${entropy.toFixed(2)} nats, as even as over ${alike} keys`]);
      if (head.distance) facts.push(["mean distance", `${head.distance[at].toFixed(1)} positions`]);
      if (look.sum < 0.999) facts.push(["given to no key", `${percent(1 - look.sum)} (a sink in the softmax)`]);
    }
    if (look.view === "in" || oneText(layer)) {
      const seeing = countsOf(head).reduce((sum, count) => sum + (count > 0 ? 1 : 0), 0);
      const average = seeing / head.keys;
      const received = head.received[at];
      facts.push(["receives in all",
        `${received.toPrecision(3)}, ${times(received / average)} the average key`]);
    }
    this.page.find("facts").replaceChildren(
      ...facts.flatMap(([term, words]) => [make("dt", "", term), make("dd", "", words)]),
    );
  }
}
