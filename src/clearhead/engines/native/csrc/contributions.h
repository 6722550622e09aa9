// w_ij Ṗ_ij, the weights times their gradients, summed by query and by key, a tile at a time (docs/maths/statistics.md).
#pragma once

#include "forward.h"
#include "sent.h"

namespace clearhead::CLEARHEAD_ISA {

template <class Score>
struct Contributions {
    float *queries, *grad, *tile, *upstream, *to_keys;

    void take(const Problem& p, const Gradients& g, Memory& memory) {
        queries = memory.take(Score::query_floats(p)), grad = memory.take(ROWS * value_wide(p));
        tile = memory.take(ROWS * PANEL), upstream = memory.take(ROWS * PANEL);
        to_keys = memory.take(g.by_key ? panels(p) * PANEL : 0);
    }

    // A tile of queries; `values`: the panels of its key head, transposed.
    void run(const Problem& p, const Gradients& g, const Packed<Score>& packed, const float* values, int64_t batch,
             int64_t head, int64_t first) {
        const int64_t rows = min(ROWS, p.queries - first), key_head = head / p.groups(), wide = value_wide(p);
        const RowSpans spans(p, batch, head, first, rows);
        float finite = 0.0f;
        Score::pack_queries(p, Rows(p.query, batch, head, first), rows, queries, finite);
        if (wide) copy_rows(Rows(g.grad, batch, head, first), rows, p.value_width, grad, wide);
        V sums[ROWS];
        for (int64_t r = 0; r < rows; r++) sums[r] = V{};
        for (int64_t panel = spans.low / PANEL;; panel++) {
            const Block block = next_block(p, batch, head, first / ROWS, panel);
            panel = block.panel;
            const int64_t begin = panel * PANEL;
            if (begin >= spans.high) break;
            SentBack sent(g.sent, batch, head, begin, keys_of(p, panel));
            for (const Part& at : Parts(p, spans, batch, head, first, rows, block)) {
                Score::scores(p, queries, packed.panel_at(p, batch, key_head, panel),
                              Rows(p.key, batch, key_head, begin), at, tile);
                product<false>(at.rows(), at.width(), p.value_width, grad + at.top * wide, wide, 1,
                               values + panel * p.value_width * PANEL + at.left, PANEL,
                               upstream + at.top * PANEL + at.left, PANEL);
                for (int64_t r = at.top; r < at.bottom; r++) {
                    const int64_t i = first + r;
                    float *s = tile + r * PANEL, *up = upstream + r * PANEL;
                    finish(p, batch, head, i, begin, at, spans.start[r], spans.stop[r], block.kind, s);
                    sent.add(i, at, up);
                    const float m = *g.maximum.at<float>(batch, head, i);
                    const float log_sum = *g.log_sum.at<float>(batch, head, i);
                    for (int64_t c = at.left; c < at.right; c += LANES) {
                        const V score = load(s + c), weight = score == -INFINITY ? V{} : exp((score - m) - log_sum);
                        V product = weight == 0.0f ? V{} : weight * load(up + c);
                        if (g.positive) product = product < 0.0f ? V{} : product;  // NaN stays
                        sums[r] += product;
                        if (g.by_key) store(to_keys + begin + c, load(to_keys + begin + c) + product);
                    }
                }
            }
        }
        if (g.by_query)
            for (int64_t r = 0; r < rows; r++) *g.by_query.at<float>(batch, head, first + r) = sum(sums[r]);
    }
};

// How the tiles of each head are dealt out: each part has sums by key of its own, which are added in one order.
inline int64_t contribution_parts(const Problem& p) {
    const int64_t heads = p.batch * p.heads;
    return max(1, min((2 * p.threads + heads - 1) / max(heads, 1), query_tiles(p)));
}

template <class Score>
int64_t contributions_floats(const Problem& p, const Gradients& g) {
    Memory shared, own;
    Packed<Score>().take(p, shared);
    shared.take(p.batch * p.key_heads * panels(p) * p.value_width * PANEL);
    if (g.by_key) shared.take(contribution_parts(p) * p.batch * p.heads * p.keys);
    Contributions<Score>().take(p, g, own);
    return shared.used + p.threads * own.used;
}

template <class Score>
void contributions(const Problem& p, const Gradients& g, float* workspace) {
    Memory shared{workspace}, counted;
    Packed<Score> packed;
    packed.take(p, shared);
    const int64_t heads = p.batch * p.heads, parts = contribution_parts(p), tiles = query_tiles(p), count = panels(p);
    const int64_t of_panel = p.value_width * PANEL;
    float* values = shared.take(p.batch * p.key_heads * count * of_panel);
    float* by_key = g.by_key ? shared.take(parts * heads * p.keys) : nullptr;
    Contributions<Score>().take(p, g, counted);
    float finite = 0.0f;
#pragma omp parallel num_threads(p.threads) reduction(+ : finite)
    {
        Memory own{workspace + shared.used + thread() * counted.used};
        Contributions<Score> mine;
        mine.take(p, g, own);
        pack_all(p, packed, finite);
        if (of_panel) {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < p.batch * p.key_heads * count; i++)
                transpose(Rows(p.value, i / count / p.key_heads, i / count % p.key_heads, i % count * PANEL),
                          keys_of(p, i % count), p.value_width, values + i * of_panel);
        }
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < heads * parts; unit++) {
            const int64_t of = unit / parts, batch = of / p.heads, head = of % p.heads;
            const float* of_head = values + (batch * p.key_heads + head / p.groups()) * count * of_panel;
            if (by_key) memset(mine.to_keys, 0, sizeof(float) * (size_t)(count * PANEL));
            for (int64_t t = unit % parts; t < tiles; t += parts) mine.run(p, g, packed, of_head, batch, head, t * ROWS);
            if (by_key) memcpy(by_key + (unit % parts * heads + of) * p.keys, mine.to_keys, sizeof(float) * (size_t)p.keys);
        }
        if (by_key) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < heads * p.keys; i++) {
                float all = 0.0f;
                for (int64_t part = 0; part < parts; part++) all += by_key[part * heads * p.keys + i];
                g.by_key.at<float>(i / p.keys / p.heads, i / p.keys % p.heads)[i % p.keys] = all;
            }
        }
    }
}

}  // namespace clearhead::CLEARHEAD_ISA
