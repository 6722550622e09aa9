// phi = (q - k)^2: the Gaussian score. Never by way of q^2 - 2qk + k^2, which loses its digits on inputs with an offset.
#pragma once

#include "mul.h"

namespace clearhead::CLEARHEAD_ISA {

struct SqDiff : Values {
    static int64_t wide(const Problem& p) { return round_up(p.width, LANES); }
    static int64_t query_floats(const Problem& p) { return (ROWS + 1) * wide(p); }  // and a row of scale * weight
    static int64_t panel_floats(const Problem& p) { return p.width * PANEL; }
    static int64_t key_floats(const Problem& p) { return PANEL * wide(p); }

    static void pack_few(const Problem& p, const Rows& queries, int64_t rows, float* out, float& finite, int64_t at) {
        copy_rows(queries, rows, p.width, out + at * wide(p), wide(p));
        check_finite(out + at * wide(p), rows * wide(p), finite);
        float* weight = out + ROWS * wide(p);
        for (int64_t d = 0; d < wide(p); d++) weight[d] = d < p.width ? 0.5f * query_factor(p, d) : 0.0f;
    }

    static void pack_queries(const Problem& p, const Rows& queries, int64_t rows, float* out, float& finite) {
        pack_few(p, queries, rows, out, finite, 0);
    }

    static void pack_panel(const Problem& p, const Rows& keys, int64_t count, float* panel) {
        transpose(keys, count, p.width, panel);
    }

    static void pack_keys(const Problem& p, const Rows& keys, int64_t count, float* out) {
        copy_rows(keys, count, p.width, out, wide(p));
    }

    template <int QUERIES>
    static INLINE void score_rows(const Problem& p, const float* queries, const float* weight, const float* panel,
                                  float* tile) {
        V acc[QUERIES];
        for (int r = 0; r < QUERIES; r++) acc[r] = V{};
        for (int64_t d = 0; d < p.width; d++) {
            const V key = load(panel + d * PANEL), w = splat(weight[d]);
            for (int r = 0; r < QUERIES; r++) {
                const V apart = queries[r * wide(p) + d] - key;
                acc[r] += w * apart * apart;
            }
        }
        for (int r = 0; r < QUERIES; r++) store(tile + r * PANEL, acc[r]);
    }

    static void scores(const Problem& p, float* queries, const float* panel, const Rows&, const Part& at,
                       float* tile) {
        const float* weight = queries + ROWS * wide(p);
        for (int64_t c = at.left; c < at.right; c += LANES) {
            int64_t r = at.top;
            for (; r + 8 <= at.bottom; r += 8)
                score_rows<8>(p, queries + r * wide(p), weight, panel + c, tile + r * PANEL + c);
            for (; r + 4 <= at.bottom; r += 4)
                score_rows<4>(p, queries + r * wide(p), weight, panel + c, tile + r * PANEL + c);
            for (; r < at.bottom; r++) score_rows<1>(p, queries + r * wide(p), weight, panel + c, tile + r * PANEL + c);
        }
    }

    template <class T>
    static void key_scores(const Problem& p, float* queries, int64_t rows, const T* key, const Prefetch& prefetch, float* tile,
                           V& odd) {
        const float* weight = queries + ROWS * wide(p);
        for (int64_t r = 0; r < rows; r++) {
            V acc{};
            for (int64_t d = 0; d < wide(p); d += LANES) {
                prefetch.fetch(key, d);
                const V apart = load(queries + r * wide(p) + d) - load(key + d);
                acc += load(weight + d) * apart * apart;
            }
            tile[r * PANEL] = sum(acc), odd += acc;
        }
    }

    // For LANES dimensions, some queries and all keys: sum_j slope (q - k) to the query, its negative to the key, and
    // sum slope (q - k)^2 to the weight.
    template <int QUERIES>
    static INLINE void gradient_rows(const float* queries, const float* keys, int64_t wide, const float* slopes,
                                     const Columns& at, float* to_query, float* to_key, V& to_weight) {
        V query[QUERIES], acc[QUERIES];
        for (int r = 0; r < QUERIES; r++) query[r] = load(queries + r * wide), acc[r] = load(to_query + r * wide);
        for (int64_t j = at.first; j < at.last; j++) {
            const V key = load(keys + j * wide);
            V back = load(to_key + j * wide);
            for (int r = 0; r < QUERIES; r++) {
                const V apart = query[r] - key, pull = slopes[r * PANEL + j] * apart;
                acc[r] += pull, back -= pull, to_weight += pull * apart;
            }
            store(to_key + j * wide, back);
        }
        for (int r = 0; r < QUERIES; r++) store(to_query + r * wide, acc[r]);
    }

    static void gradients(const Problem& p, const float* queries, const float*, const float* keys, const float* slopes,
                          const Part& at, float* to_query, float* to_key, double* to_weight, double) {
        const int64_t wide = SqDiff::wide(p);
        for (int64_t d = 0; d < wide; d += LANES) {
            V weight{};
            int64_t r = at.top;
            for (; r + 4 <= at.bottom; r += 4)
                gradient_rows<4>(queries + r * wide + d, keys + d, wide, slopes + r * PANEL, at, to_query + r * wide + d,
                                 to_key + d, weight);
            for (; r < at.bottom; r++)
                gradient_rows<1>(queries + r * wide + d, keys + d, wide, slopes + r * PANEL, at, to_query + r * wide + d,
                                 to_key + d, weight);
            for (int x = 0; x < LANES; x++) to_weight[d + x] += weight[x];
        }
    }

    static float query_factor(const Problem& p, int64_t d) {
        return 2.0f * (float)p.scale * (p.weight ? p.weight.at<float>(d, 0)[0] : 1.0f);
    }
    static float key_factor(const Problem& p, int64_t d) { return query_factor(p, d); }
    static double weight_gradient(const Problem& p, double sum, double) { return p.scale * sum; }
};

}  // namespace clearhead::CLEARHEAD_ISA
