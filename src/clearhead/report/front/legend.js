// ---- What the colours mean.

function paintLegend(current) {
  const { head, look, pair, table, scale, floor } = current;
  const ramp = byId("ramp").getContext("2d");
  const image = new ImageData(256, 1);
  for (let step = 0; step < 256; step++) {
    for (let c = 0; c < 3; c++) image.data[4 * step + c] = table[3 * step + c];
    image.data[4 * step + 3] = 255;
  }
  ramp.putImageData(image, 0, 0);
  const hatch = byId("hatch").getContext("2d");
  hatch.fillStyle = hatching(hatch, themeColours(), 1);
  hatch.fillRect(0, 0, 28, 14);

  const box = byId("legend-ticks");
  box.replaceChildren();
  const put = (weight, text, className) => {
    const mark = make("span", className, text);
    box.append(mark);
    const share = stepOf(weight, scale, floor) / 255;
    mark.style.left = `${100 * share}%`;
    mark.classList.toggle("at-end", share > 0.85);
    mark.classList.toggle("at-start", share < 0.15);
  };
  if (scale === "log") {
    put(floor, `≤ ${percent(floor)}`, "tick");
    for (let weight = 0.1; weight > 4 * floor; weight /= 10) {
      put(weight, `${Number((100 * weight).toPrecision(1))}%`, "tick");
    }
  } else {
    put(0, "0%", "tick");
    put(0.5, "50%", "tick");
  }
  put(1, "100%", "tick");
  const query = look.view === "out" ? look.token : pair;
  const counts = countsOf(head);
  const known = query !== null && counts[query] > 0;
  byId("legend-equal").hidden = !known;
  if (!known) return;
  const whose = head.alike ? "" : ` of “${nameOf(head.layer.queryText, query)}”`;
  put(1 / counts[query], "", "equal");
  byId("legend-equal").textContent =
    `mark: equal share${whose}, 1/${counts[query]} = ${percent(1 / counts[query])}`;
}
