// ---- The formula. Numbers are float64 here, as in NumPy; only colours are rounded further.

/** What dimension d adds to the score of a pair, before the scale. */
const termOf = (head, i, j, d) => head.query[i * head.features + d] * head.key[j * head.features + d];

function dot(head, i, j) {
  const { query, key, features } = head;
  let sum = 0;
  for (let f = 0, a = i * features, b = j * features; f < features; f++) sum += query[a + f] * key[b + f];
  return sum;
}

/** The score of a pair from its product: scaled, then capped, then with its bias. */
function scoreFrom(head, product, i, j) {
  let score = product * head.scale;
  if (head.softcap !== null) score = head.softcap * Math.tanh(score / head.softcap);
  return head.bias ? score + head.bias[i * head.keys + j] : score;
}

const scoreOf = (head, i, j) => scoreFrom(head, dot(head, i, j), i, j);

/** May query i see key j? Inside its span, and in no hole of it. */
function mayLook(head, i, j) {
  if (j < head.start[i] || j >= head.stop[i]) return false;
  return !head.bias || head.bias[i * head.keys + j] !== -Infinity;
}

/** Whether spans alone say who may see whom. */
const onlySpans = (head) => !head.bias;

function weightOf(head, i, j) {
  const total = head.logsumexp[i];
  return total === -Infinity || !mayLook(head, i, j) ? 0 : Math.exp(scoreOf(head, i, j) - total);
}

/** How many keys each query may see, counted once for a head. */
function countsOf(head) {
  if (head.counts) return head.counts;
  const counts = new Int32Array(head.queries);
  for (let i = 0; i < head.queries; i++) {
    if (!head.bias) counts[i] = Math.max(0, head.stop[i] - head.start[i]);
    else for (let j = head.start[i]; j < head.stop[i]; j++) if (mayLook(head, i, j)) counts[i]++;
  }
  head.counts = counts;
  head.mostKeys = counts.reduce((most, count) => Math.max(most, count), 1);
  head.alike = counts.every((count) => count === 0 || count === head.mostKeys);
  return counts;
}

/** What query i would give each key if it looked at all it may see alike. */
const equalShare = (head, i) => 1 / countsOf(head)[i];

/**
 * All weights of one token: of a query on the keys (view "out"), or of the queries on a key ("in").
 * `ranked` lists the allowed others, strongest first.
 */
function lookOf(head, view, token) {
  const out = view === "out";
  const length = out ? head.keys : head.queries;
  const weights = new Float64Array(length);
  const ranked = [];
  let sum = 0;
  for (let other = 0; other < length; other++) {
    const [i, j] = out ? [token, other] : [other, token];
    if (!mayLook(head, i, j)) continue;
    weights[other] = weightOf(head, i, j);
    sum += weights[other];
    ranked.push(other);
  }
  ranked.sort((a, b) => weights[b] - weights[a] || a - b);
  return { head, view, token, weights, ranked, sum };
}

/** The entropy of a query's weights in nats; of those divided by their sum, where a sink takes a share. */
function entropyOf(look) {
  const shares = look.ranked.map((other) => look.weights[other] / look.sum);
  return shares.reduce((sum, share) => (share > 0 ? sum - share * Math.log(share) : sum + 0 * share), 0);
}

/** The rank of `other` among the allowed: 1 is the strongest, equals share the better rank. */
function rankOf(look, other) {
  const weight = look.weights[other];
  return 1 + look.ranked.reduce((above, each) => above + (look.weights[each] > weight ? 1 : 0), 0);
}

/** Time for other work: input, painting. */
const breathe = () => new Promise((resolve) => { setTimeout(resolve, 0); });
