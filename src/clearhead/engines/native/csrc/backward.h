// The gradients, a panel of keys at a time over the tiles of queries that see it: the scores are computed again, and nothing
// of the matrix is kept (docs/maths/softmax.md).
#pragma once

#include "forward.h"
#include "sent.h"

namespace clearhead::CLEARHEAD_ISA {

// How the work is shared: the units are the key heads of all sequences, times `parts` of their panels. Each owns the keys of
// its panels, and has its own sum of the queries' gradients; those of several parts are added at the end in one order, so
// that results depend on the number of threads, not on their timing. Where a bias has a gradient, all sequences and heads
// count as one, since they may share it.
struct Shares {
    int64_t heads, parts;

    Shares(const Problem& p, const Gradients& g) {
        const bool bias = g.dense || g.relative;
        heads = bias ? 1 : p.batch * p.key_heads;
        const bool enough = heads >= 3 * p.threads || heads % p.threads == 0;
        parts = !bias && enough ? 1 : (2 * p.threads + heads - 1) / max(heads, 1);
        parts = max(1, min(parts, panels(p)));
    }
};

// The memory that all threads share.
template <class Score>
struct BackwardShared {
    float *to_query, *to_dense, *to_relative, *query_factor, *key_factor;
    double* to_weight;
    int64_t* hull;   // of each tile of queries: the first key that it sees, and the one after the last
    int64_t* reach;  // of each panel of keys: the first tile that sees some of it, and the one after the last

    void take(const Problem& p, const Gradients& g, Memory& memory) {
        const Shares shares(p, g);
        const int64_t wide = Score::wide(p), of_heads = p.batch * p.heads;
        to_query = shares.parts > 1 ? memory.take(shares.parts * of_heads * p.queries * wide) : nullptr;
        to_weight = reinterpret_cast<double*>(memory.take(2 * shares.heads * shares.parts * weight_sums(p)));
        hull = reinterpret_cast<int64_t*>(memory.take(4 * of_heads * query_tiles(p)));
        reach = reinterpret_cast<int64_t*>(memory.take(4 * of_heads * panels(p)));
        to_dense = split_dense(g) ? memory.take(shares.parts * g.dense_size) : nullptr;
        to_relative = g.relative ? memory.take(shares.parts * g.relative_size) : nullptr;
        query_factor = memory.take(wide), key_factor = memory.take(wide);
    }

    // Fills `reach` of a head, of whose tiles `hull` is known.
    void find_reach(const Problem& p, int64_t batch, int64_t head) {
        const int64_t tiles = query_tiles(p), *hull_of = hull + 2 * (batch * p.heads + head) * tiles;
        int64_t* of = reach + 2 * (batch * p.heads + head) * panels(p);
        for (int64_t panel = 0; panel < panels(p); panel++) of[2 * panel] = tiles, of[2 * panel + 1] = 0;
        for (int64_t tile = 0; tile < tiles; tile++)
            for (int64_t panel = hull_of[2 * tile] / PANEL;; panel++) {
                panel = next_block(p, batch, head, tile, panel).panel;
                if (panel * PANEL >= hull_of[2 * tile + 1]) break;
                of[2 * panel] = min(of[2 * panel], tile), of[2 * panel + 1] = tile + 1;
            }
    }

    static int64_t weight_sums(const Problem& p) { return Score::wide(p) + LANES; }
    // A dense bias that is the same for all keys is shared by the parts.
    static bool split_dense(const Gradients& g) { return g.dense && g.dense.strides[3] == 0; }
};

INLINE void put(const Gradients& g, float& to, float x) { to = g.adds ? to + x : x; }

// A panel of keys and of values, as the products read them, and the sums of their gradients.
template <class Score>
struct BackwardPanel {
    float *panel, *keys, *values, *to_key, *to_value;

    void take(const Problem& p, Memory& memory) {
        panel = memory.take(Score::panel_floats(p)), keys = memory.take(Score::key_floats(p));
        values = memory.take(Score::value_panel_floats(p));
        to_key = memory.take(PANEL * Score::wide(p)), to_value = memory.take(PANEL * value_wide(p));
    }

    void begin(const Problem& p, int64_t batch, int64_t key_head, int64_t index) {
        const Rows key(p.key, batch, key_head, index * PANEL), value(p.value, batch, key_head, index * PANEL);
        Score::pack_panel(p, key, keys_of(p, index), panel);
        Score::pack_keys(p, key, keys_of(p, index), keys);
        Score::pack_value_panel(p, value, keys_of(p, index), values);
        memset(to_key, 0, sizeof(float) * (size_t)(PANEL * Score::wide(p)));
        memset(to_value, 0, sizeof(float) * (size_t)(PANEL * value_wide(p)));
    }
};

// Some of one part's panels: the first, and those that are `step` further each.
struct SomePanels {
    int64_t first, step, count;

    int64_t at(int64_t n) const { return first + n * step; }
};

template <class Score>
struct Backward {
    static constexpr int64_t MANY = Score::PANELS;  // panels at once, for which a tile of queries is packed once

    BackwardPanel<Score> panels_of[MANY];
    float *queries, *grad, *tile, *slopes, *capped, *to_query;

    void take(const Problem& p, const Gradients& g, Memory& memory) {
        for (BackwardPanel<Score>& panel : panels_of) panel.take(p, memory);
        queries = memory.take(Score::query_floats(p)), grad = memory.take(Score::upstream_floats(p, g));
        tile = memory.take(ROWS * PANEL), slopes = memory.take(ROWS * PANEL);
        capped = memory.take(p.softcap > 0 ? ROWS * PANEL : 0);
        to_query = memory.take(Shares(p, g).parts > 1 ? 0 : p.groups() * p.queries * Score::wide(p));
    }

    // The sums of the gradients of one head's queries.
    float* of_queries(const Problem& p, const BackwardShared<Score>& shared, int64_t part, int64_t batch, int64_t head) const {
        const int64_t size = p.queries * Score::wide(p);
        if (shared.to_query) return shared.to_query + ((part * p.batch + batch) * p.heads + head) * size;
        return to_query + head % p.groups() * size;
    }

    // One part's panels of one key head.
    void key_head(const Problem& p, const Gradients& g, const BackwardShared<Score>& shared, int64_t part, int64_t parts,
                  int64_t batch, int64_t key_head, double* to_weight) {
        const int64_t wide = Score::wide(p), first = key_head * p.groups(), size = p.groups() * p.queries;
        float* back = of_queries(p, shared, part, batch, first);
        memset(back, 0, sizeof(float) * (size_t)(size * wide));
        for (int64_t index = part; index < panels(p); index += MANY * parts) {
            const int64_t left = (panels(p) - index + parts - 1) / parts;
            run(p, g, shared, part, batch, key_head, SomePanels{index, parts, min(MANY, left)}, to_weight);
        }
        if (parts > 1) return;
        for (int64_t i = 0; i < size; i++) {
            float* to = g.query.at<float>(batch, first + i / p.queries, i % p.queries);
            for (int64_t d = 0; d < p.width; d++) put(g, to[d], back[i * wide + d] * shared.query_factor[d]);
        }
    }

    // Some panels of one key head, over all the queries that see them.
    void run(const Problem& p, const Gradients& g, const BackwardShared<Score>& shared, int64_t part, int64_t batch,
             int64_t key_head, const SomePanels& some, double* to_weight) {
        const int64_t wide = Score::wide(p), out_wide = value_wide(p);
        for (int64_t n = 0; n < some.count; n++) panels_of[n].begin(p, batch, key_head, some.at(n));
        for (int64_t head = key_head * p.groups(); head < (key_head + 1) * p.groups(); head++) {
            const int64_t* reach = shared.reach + 2 * (batch * p.heads + head) * panels(p);
            int64_t from = query_tiles(p), to = 0;
            for (int64_t n = 0; n < some.count; n++)
                from = min(from, reach[2 * some.at(n)]), to = max(to, reach[2 * some.at(n) + 1]);
            for (int64_t t = from; t < to; t++) tile_of(p, g, shared, part, batch, head, t, some, to_weight);
        }
        for (int64_t n = 0; n < some.count; n++) {
            const int64_t begin = some.at(n) * PANEL;
            const float *to_key = panels_of[n].to_key, *to_value = panels_of[n].to_value;
            for (int64_t j = 0; j < keys_of(p, some.at(n)); j++) {
                float* to = g.key.at<float>(batch, key_head, begin + j);
                for (int64_t d = 0; d < p.width; d++) put(g, to[d], to_key[j * wide + d] * shared.key_factor[d]);
                if (!out_wide) continue;
                float* values_to = g.value.at<float>(batch, key_head, begin + j);
                for (int64_t e = 0; e < p.value_width; e++) put(g, values_to[e], to_value[j * out_wide + e]);
            }
        }
    }

    // Tile t of the queries with the panels.
    void tile_of(const Problem& p, const Gradients& g, const BackwardShared<Score>& shared, int64_t part, int64_t batch,
                 int64_t head, int64_t t, const SomePanels& some, double* to_weight) {
        const int64_t* hull = shared.hull + 2 * ((batch * p.heads + head) * query_tiles(p) + t);
        int64_t seen[MANY], count = 0;
        for (int64_t n = 0; n < some.count; n++) {
            const int64_t begin = some.at(n) * PANEL;
            if (hull[0] < begin + PANEL && hull[1] > begin && kind_of(p, batch, head, t, some.at(n)) != NONE) seen[count++] = n;
        }
        if (!count) return;
        const int64_t first = t * ROWS, rows = min(ROWS, p.queries - first);
        const RowSpans spans(p, batch, head, first, rows);
        const Rows query(p.query, batch, head, first), upstream(g.grad, batch, head, first);
        float* back = of_queries(p, shared, part, batch, head) + first * Score::wide(p);
        float finite = 0.0f;
        Upstream up;
        bool packed = false, finite_grad = false;
        Dropout dropout;
        for (int64_t s = 0; s < count; s++) {
            const int64_t index = some.at(seen[s]), begin = index * PANEL;
            const Block block{index, kind_of(p, batch, head, t, index)};
            const Parts parts(p, spans, batch, head, first, rows, block);
            if (!parts.count) continue;
            if (!packed) {
                Score::pack_queries(p, query, rows, queries, finite);
                Score::pack_again(p, query, rows, queries);
                up = Score::pack_upstream(p, g, upstream, rows, grad);
                finite_grad = finite_upstream(g, batch, head, first, rows);
                if (p.dropout_p > 0) dropout.begin(p, batch, head);
                packed = true;
            }
            if (p.dropout_p > 0) dropout.panel(begin);
            SentBack sent(g.sent, batch, head, begin, keys_of(p, index));
            const BackwardPanel<Score>& of = panels_of[seen[s]];
            for (const Part& at : parts) {
                Score::scores(p, queries, of.panel, Rows(p.key, batch, head / p.groups(), begin), at, tile);
                Score::to_weights(p, up, of.values, at, slopes);
                const V all = to_slopes(p, g, shared, part, batch, head, first, begin, at, spans, block.kind, dropout, sent);
                if (finite_grad) Score::to_values(p, queries, up, tile, at, of.to_value);
                else pairs_to_values(p, upstream, at, of.to_value);
                Score::gradients(p, queries, of.panel, of.keys, slopes, at, back, of.to_key, to_weight, sum(all));
            }
        }
    }

    // Whether the gradient of the output is finite in all rows of a tile. Where it is not, delta, a sum over its products, is not.
    static bool finite_upstream(const Gradients& g, int64_t batch, int64_t head, int64_t first, int64_t rows) {
        float zero = 0.0f;
        for (int64_t r = 0; r < rows; r++) zero += *g.delta.at<float>(batch, head, first + r) * 0.0f;
        return zero == 0.0f;
    }

    // Adds the gradients of the values pair by pair: a weight of 0 gives 0, not 0 * inf to a key that the row does not see.
    void pairs_to_values(const Problem& p, const Rows& upstream, const Part& at, float* to_value) {
        const int64_t wide = value_wide(p);
        for (int64_t r = at.top; r < at.bottom; r++)
            upstream.from(r).read([&](const auto* row) {
                for (int64_t j = at.first; j < at.last; j++) {
                    const float weight = tile[r * PANEL + j];
                    if (weight == 0.0f) continue;
                    for (int64_t e = 0; e < p.value_width; e++) to_value[j * wide + e] += weight * number(row[e]);
                }
            });
    }

    // From scores and the weights' gradients to weights and the scores' gradients, whose sum is returned.
    V to_slopes(const Problem& p, const Gradients& g, const BackwardShared<Score>& shared, int64_t part, int64_t batch,
              int64_t head, int64_t first, int64_t begin, const Part& at, const RowSpans& spans, int32_t kind,
              const Dropout& dropout, SentBack& sent) {
        V all{};
        for (int64_t r = at.top; r < at.bottom; r++) {
            const int64_t i = first + r;
            float *s = tile + r * PANEL, *slope = slopes + r * PANEL, *cap = p.softcap > 0 ? capped + r * PANEL : nullptr;
            finish(p, batch, head, i, begin, at, spans.start[r], spans.stop[r], kind, s, cap);
            const float m = *g.maximum.at<float>(batch, head, i), delta = *g.delta.at<float>(batch, head, i);
            const float log_sum = *g.log_sum.at<float>(batch, head, i);
            sent.add(i, at, slope);
            if (g.sent.log_weight) {  // the logarithm of a weight of 0 is not finite, and not read below
                const float times = *g.sent.log_weight.at<float>(batch, head, i);
                for (int64_t c = at.left; c < at.right; c += LANES)
                    store(slope + c, load(slope + c) + times * ((load(s + c) - m) - log_sum));
            }
            for (int64_t c = at.left; c < at.right; c += LANES) {
                // a masked pair has no weight in a row of NaN either
                const V score = load(s + c);
                V weight = score == -INFINITY ? V{} : exp((score - m) - log_sum), upstream = load(slope + c), kept = weight;
                if (p.dropout_p > 0) {
                    const V factor = dropout.factors(p, i, c);
                    kept *= factor, upstream *= factor;
                }
                store(s + c, kept);
                // a weight of 0 gives 0, not 0 * inf where `upstream` overflows
                const V steep = weight == 0.0f ? V{} : flush(weight * (upstream - delta));
                store(slope + c, steep);
            }
            sent.add_to_scores(i, at, slope);
            add_bias(g, shared, part, batch, head, i, begin, at, p.queries, slope);
            for (int64_t c = at.left; c < at.right; c += LANES) {
                V steep = load(slope + c);
                if (cap) {
                    const V share = load(cap + c) * (float)(1.0 / p.softcap);
                    steep = steep == 0.0f ? steep : flush(steep * (1.0f - share * share));
                    store(slope + c, steep);
                }
                all += steep;
            }
        }
        return all;
    }

    // The bias is added last, so its gradient is the slope.
    static void add_bias(const Gradients& g, const BackwardShared<Score>& shared, int64_t part, int64_t batch,
                         int64_t head, int64_t i, int64_t begin, const Columns& at, int64_t queries, const float* slope) {
        if (g.dense) {
            const int64_t step = g.dense.strides[3];
            float* to = g.dense.at<float>(batch, head, i) + begin * step;
            if (shared.to_dense) to = shared.to_dense + part * g.dense_size + (to - static_cast<float*>(g.dense.data));
            for (int64_t c = at.first; c < at.last; c++) to[c * step] += slope[c];
        }
        if (g.relative) {
            float* to = shared.to_relative + part * g.relative_size + batch * g.relative.strides[0] +
                        head * g.relative.strides[1] + begin - i + queries - 1;
            for (int64_t c = at.first; c < at.last; c++) to[c] += slope[c];
        }
    }
};

template <class Score>
int64_t backward_floats(const Problem& p, const Gradients& g) {
    Memory shared, own;
    BackwardShared<Score>().take(p, g, shared);
    Backward<Score>().take(p, g, own);
    return shared.used + p.threads * own.used;
}

template <class Score>
void backward(const Problem& p, const Gradients& g, float* workspace) {
    Memory memory{workspace}, counted;
    BackwardShared<Score> shared;
    shared.take(p, g, memory);
    Backward<Score>().take(p, g, counted);
    const Shares shares(p, g);
    const int64_t wide = Score::wide(p), sums = shared.weight_sums(p), tiles = query_tiles(p);
    const int64_t of_heads = p.batch * p.heads, units = shares.heads * shares.parts;
    const int64_t each = p.batch * p.key_heads / max(shares.heads, 1);
    memset(shared.to_weight, 0, sizeof(double) * (size_t)(units * sums));
    if (shared.to_dense) memset(shared.to_dense, 0, sizeof(float) * (size_t)(shares.parts * g.dense_size));
    if (shared.to_relative) memset(shared.to_relative, 0, sizeof(float) * (size_t)(shares.parts * g.relative_size));
    for (int64_t d = 0; d < p.width; d++)
        shared.query_factor[d] = Score::query_factor(p, d), shared.key_factor[d] = Score::key_factor(p, d);
#pragma omp parallel num_threads(p.threads)
    {
        Memory own{workspace + memory.used + thread() * counted.used};
        Backward<Score> mine;
        mine.take(p, g, own);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < of_heads * tiles; i++) {
            const int64_t batch = i / tiles / p.heads, head = i / tiles % p.heads, first = i % tiles * ROWS;
            const int64_t rows = min(ROWS, p.queries - first);
            const RowSpans spans(p, batch, head, first, rows);
            shared.hull[2 * i] = spans.low, shared.hull[2 * i + 1] = spans.high;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < of_heads; i++) shared.find_reach(p, i / p.heads, i % p.heads);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < units; unit++) {
            const int64_t part = unit % shares.parts;
            double* to_weight = shared.to_weight + unit * sums;
            for (int64_t of = unit / shares.parts * each; of < (unit / shares.parts + 1) * each; of++)
                mine.key_head(p, g, shared, part, shares.parts, of / p.key_heads, of % p.key_heads, to_weight);
        }
        if (shares.parts > 1) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < of_heads * p.queries; i++) {
                float* to = g.query.at<float>(i / p.queries / p.heads, i / p.queries % p.heads, i % p.queries);
                for (int64_t d = 0; d < p.width; d++) {
                    float all = 0.0f;
                    for (int64_t part = 0; part < shares.parts; part++)
                        all += shared.to_query[(part * of_heads * p.queries + i) * wide + d];
                    put(g, to[d], all * shared.query_factor[d]);
                }
            }
        }
    }
    if (g.weight)
        for (int64_t d = 0; d < p.width; d++) {
            double total[2] = {0, 0};
            for (int64_t unit = 0; unit < units; unit++)
                total[0] += shared.to_weight[unit * sums + d], total[1] += shared.to_weight[unit * sums + wide];
            g.weight.at<float>(d, 0)[0] = (float)Score::weight_gradient(p, total[0], total[1]);
        }
    for (int64_t part = 0; part < shares.parts; part++) {
        if (shared.to_dense)
            for (int64_t i = 0; i < g.dense_size; i++)
                static_cast<float*>(g.dense.data)[i] += shared.to_dense[part * g.dense_size + i];
        if (shared.to_relative)
            for (int64_t i = 0; i < g.relative_size; i++)
                static_cast<float*>(g.relative.data)[i] += shared.to_relative[part * g.relative_size + i];
    }
}

}  // namespace clearhead::CLEARHEAD_ISA
