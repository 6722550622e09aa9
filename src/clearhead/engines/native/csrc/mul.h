// phi = q * k: the scaled dot product. Keys lie in panels [D][64], so that 64 scores of a query stand side by side.
#pragma once

#include "values.h"

namespace clearhead::CLEARHEAD_ISA {

// Prefetches the key that decode.h reads next, piece by piece while a key is computed: many requests at once would queue.
struct Prefetch {
    const char *key, *value;

    template <class T>
    INLINE void fetch(const T*, int64_t d) const {
        __builtin_prefetch(key + d * (int64_t)sizeof(T)), __builtin_prefetch(value + d * (int64_t)sizeof(T));
    }
};

// A score, with the members that the passes over the tiles call; TanhAdd and SqDiff have the same members.
struct Mul : Values {
    static int64_t wide(const Problem& p) { return round_up(p.width, LANES); }
    static int64_t query_floats(const Problem& p) { return ROWS * wide(p); }     // a tile of queries, packed
    static int64_t panel_floats(const Problem& p) { return p.width * PANEL; }    // a panel of keys, for the scores
    static int64_t key_floats(const Problem& p) { return PANEL * wide(p); }      // the same, for its gradients

    // Packs queries for `key_scores`, as the rows of a tile from `at` on, times the scale. `finite` becomes NaN
    // where a number is not finite.
    static void pack_few(const Problem& p, const Rows& queries, int64_t rows, float* out, float& finite, int64_t at) {
        queries.read([&](const auto* first) {
            const int64_t wide = Mul::wide(p);
            const float scale = (float)p.scale;
            V zero{};
            for (int64_t r = 0; r < rows; r++) {
                const auto* from = first + r * queries.step;
                float* to = out + (at + r) * wide;
                int64_t d = 0;
                for (; d + LANES <= p.width; d += LANES) {
                    const V q = load(from + d);
                    zero += 0.0f * q;
                    store(to + d, scale * q);
                }
                for (; d < p.width; d++) finite += 0.0f * number(from[d]), to[d] = scale * number(from[d]);
                for (; d < wide; d++) to[d] = 0.0f;
            }
            finite += sum(zero);
        });
    }

    // Packs a tile of queries for the other members.
    static void pack_queries(const Problem& p, const Rows& queries, int64_t rows, float* out, float& finite) {
        pack_few(p, queries, rows, out, finite, 0);
    }

    static void pack_panel(const Problem& p, const Rows& keys, int64_t count, float* panel) {
        transpose(keys, count, p.width, panel);
    }

    static void pack_keys(const Problem& p, const Rows& keys, int64_t count, float* out) {
        copy_rows(keys, count, p.width, out, wide(p));
    }

    // tile[r][c] for the rows and columns `at`. The argument without a name: the panel's keys as rows.
    static void scores(const Problem& p, float* queries, const float* panel, const Rows&, const Part& at,
                       float* tile) {
        product<false>(at.rows(), at.width(), p.width, queries + at.top * wide(p), wide(p), 1, panel + at.left, PANEL,
                       tile + at.top * PANEL + at.left, PANEL);
    }

    // The scores of `rows` queries with one key, whose `wide` numbers are read where they lie: tile[r * PANEL]. `odd`
    // does not stay finite where a number of the key is not.
    template <class T>
    static void key_scores(const Problem& p, float* queries, int64_t rows, const T* key, const Prefetch& prefetch, float* tile,
                           V& odd) {
        const int64_t wide = Mul::wide(p);
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) key_rows<4>(wide, queries + r * wide, key, prefetch, tile + r * PANEL, odd);
        for (; r < rows; r++) key_rows<1>(wide, queries + r * wide, key, prefetch, tile + r * PANEL, odd);
    }

    template <int QUERIES, class T>
    static INLINE void key_rows(int64_t wide, const float* queries, const T* key, const Prefetch& prefetch, float* tile,
                                V& odd) {
        V acc[QUERIES];
        for (int r = 0; r < QUERIES; r++) acc[r] = V{};
        for (int64_t d = 0; d < wide; d += LANES) {
            prefetch.fetch(key, d);
            const V k = load(key + d);
            for (int r = 0; r < QUERIES; r++) acc[r] += load(queries + r * wide + d) * k;
        }
        for (int r = 0; r < QUERIES; r++) tile[r * PANEL] = sum(acc[r]), odd += acc[r];
    }

    // Adds the gradients of queries, keys and weight from the slopes (the scores' gradient), each without its factor;
    // the last argument is the sum of the slopes.
    static void gradients(const Problem& p, const float* queries, const float*, const float* keys, const float* slopes,
                          const Part& at, float* to_query, float* to_key, double*, double) {
        const int64_t wide = Mul::wide(p), row = at.top * wide;
        slopes += at.top * PANEL + at.first;
        product<true>(at.rows(), wide, at.keys(), slopes, PANEL, 1, keys + at.first * wide, wide, to_query + row, wide);
        product<true>(at.keys(), wide, at.rows(), slopes, 1, PANEL, queries + row, wide, to_key + at.first * wide, wide);
    }

    static float query_factor(const Problem& p, int64_t) { return (float)p.scale; }
    static float key_factor(const Problem&, int64_t) { return 1.0f; }
    static double weight_gradient(const Problem&, double, double) { return 0.0; }  // the engine multiplies the query by it
};

}  // namespace clearhead::CLEARHEAD_ISA
