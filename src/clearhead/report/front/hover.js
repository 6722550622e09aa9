// ---- Pointer and keys on the map.

function listenToMap(currentState, choose) {
  const canvas = byId("map");
  const pairAt = (event) => {
    const current = currentState();
    const box = canvas.getBoundingClientRect();
    const cell = current && cellAt(mapView.layout, event.clientX - box.left, event.clientY - box.top);
    return cell && strongestIn(current.head, mapView.layout, cell);
  };
  canvas.addEventListener("pointermove", (event) => {
    const found = pairAt(event);
    if (found) showHover(currentState(), found, event);
    else byId("hover").hidden = true;
  });
  canvas.addEventListener("pointerleave", () => { byId("hover").hidden = true; });
  canvas.addEventListener("click", (event) => {
    const found = pairAt(event);
    if (found) choose(chosenPair(currentState().look.view, found.i, found.j));
  });
  canvas.addEventListener("keydown", (event) => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const step = steps[event.key];
    const current = currentState();
    if (!step || !current) return;
    event.preventDefault();
    const { head, look, pair } = current;
    const [i, j] = look.view === "out" ? [look.token, pair] : [pair, look.token];
    const { down, across } = mapView.layout;
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
    choose(chosenPair(look.view,
      clamp((i ?? 0) + step[0] * down.per, head.queries),
      clamp((j ?? 0) + step[1] * across.per, head.keys)));
  });
}

/** The change of state that makes query i and key j the pair looked at. */
const chosenPair = (view, i, j) => (view === "out" ? { token: i, pair: j } : { token: j, pair: i });

let hovered = null; // the last look computed for the pointer, kept while it stays in one row

function showHover({ head, look }, { i, j }, event) {
  const [token, other] = look.view === "out" ? [i, j] : [j, i];
  if (!hovered || hovered.head !== head || hovered.view !== look.view || hovered.token !== token) {
    hovered = lookOf(head, look.view, token);
  }
  const box = byId("hover");
  box.textContent = mayLook(head, i, j)
    ? `${pairName(head.layer, i, j)} ${percent(hovered.weights[other])}, ${placeOf(hovered, other)}`
    : `${pairName(head.layer, i, j)} ${placeOf(hovered, other)}`;
  box.hidden = false;
  const frame = byId("map-box").getBoundingClientRect();
  const x = event.clientX - frame.left;
  const y = event.clientY - frame.top;
  box.style.left = `${Math.max(0, Math.min(x + 14, frame.width - box.offsetWidth))}px`;
  box.style.top = `${y > frame.height / 2 ? y - box.offsetHeight - 12 : y + 18}px`;
}
