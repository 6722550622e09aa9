// ---- What the panes read until they are given a run.
const run = new Run(embeddedSource(document));
const { meta } = run.source;
const byId = (id) => document.getElementById(id);
const block = (number) => run.array(number);

async function openHead(layerIndex, headIndex) {
  const head = await run.open(layerIndex, headIndex);
  if (head.bias === undefined) {
    const { queries, keys } = head;
    head.bias = !hasBias(head) && !head.holes ? null : Float32Array.from({ length: queries * keys }, (_, at) => {
      const [i, j] = [Math.floor(at / keys), at % keys];
      const hidden = j >= head.start[i] && j < head.stop[i] && !mayLook(head, i, j);
      return hidden ? -Infinity : biasOf(head, i, j);
    });
  }
  return head;
}
