// phi = tanh(q + k): the additive score, without a tanh (docs/maths/additive.md).
//
//     sum_h w_h tanh(q_h + k_h) = sum_h w_h - 2 sum_h w_h / t_h,    t_h = 1 + e^(2 q_h) e^(2 k_h)
//
// The exponentials are taken once for each query and each key, and four terms share one reciprocal. This is right as
// long as the product of the four t stays below 2^126. The difference of the two sums has an error of a rounding of sum |w|,
// however small the difference is: too much where the weights are large, or all q + k near 0. Each pair of tiles takes one of
// five forms:
//     SERIES   tanh by its series, where all |q + k| are below 0.625
//     EXACT    tanh itself, where sum |w| is large
//     FOLDED   w is in t, which saves four products:  t / w = (A / w) B + 1 / w
//     CLAMPED  t is at most 2^31, where 1 / t is 0 to float32's digits;  |q| and |k| are below 43
//     DIRECT   t from e^(2 (q + k)), clamped in the same way: any numbers
#pragma once

#include "mul.h"

namespace clearhead::CLEARHEAD_ISA {

struct TanhAdd : Values {
    enum Form { FOLDED, CLAMPED, DIRECT, SERIES, EXACT };
    static constexpr float HEAVY = 32.0f;             // scale * sum |w| above this is large: a rounding of it is 4e-6
    static constexpr float REACH = 43.0f;             // e^(2 * 43) < 2^126
    static constexpr float BITS = 2.88539008f;        // log2(e^2)
    static constexpr float LIMIT = 2147483648.0f;     // 2^31
    static constexpr float LIMIT_LOG = 21.4875626f;   // and its natural logarithm
    static constexpr float LEAST = 1.0f / (1 << 30);  // the least |w| over the largest: a smaller w counts as this

    static int64_t wide(const Problem& p) { return round_up(p.width, LANES); }

    // A tile of queries: e^2q, e^2q / w, q; then rows of w / max |w| turned over, w, bits of 1 / w, tops of q in bits,
    // where the last two say how large t may become; three numbers; and room for a panel of k as it is.
    struct Queries {
        float *raised, *folded, *plain, *inverse, *weight, *spare, *top, *numbers, *panel;
        Queries(const Problem& p, float* at) {
            const int64_t wide = TanhAdd::wide(p);
            raised = at, folded = raised + ROWS * wide, plain = folded + ROWS * wide, inverse = plain + ROWS * wide;
            weight = inverse + wide, spare = weight + wide, top = spare + wide, numbers = top + wide;
            panel = numbers + LANES;
        }
    };
    enum Number { LARGEST_WEIGHT, ALL_WEIGHTS, ABSOLUTE_WEIGHTS, LARGEST_QUERY };  // of Queries.numbers

    // A panel of keys: e^2k, [wide][PANEL]; the tops of k in bits; the largest |k|.
    static int64_t query_floats(const Problem& p) { return (3 * ROWS + 4 + PANEL) * wide(p) + LANES; }
    static int64_t panel_floats(const Problem& p) { return (PANEL + 1) * wide(p) + LANES; }
    static int64_t key_floats(const Problem& p) { return 2 * PANEL * wide(p); }  // e^2k and k, by rows

    static INLINE V raise(V x) { return exp(min(splat(REACH + 1), x), 2.0f); }  // NaN stays NaN

    // Packs queries for `key_scores`, as the rows from `at` on.
    static void pack_few(const Problem& p, const Rows& queries, int64_t rows, float* out, float& finite, int64_t at) {
        const int64_t wide = TanhAdd::wide(p);
        const Queries to(p, out);
        double all = 0.0, absolute = 0.0;
        for (int64_t d = 0; d < wide; d++) {
            to.weight[d] = d >= p.width ? 0.0f : p.weight ? *p.weight.at<float>(d, 0) : 1.0f;
            all += to.weight[d], absolute += __builtin_fabsf(to.weight[d]);
        }
        to.numbers[ALL_WEIGHTS] = (float)(p.scale * all);
        to.numbers[ABSOLUTE_WEIGHTS] = (float)(__builtin_fabs(p.scale) * absolute);
        copy_rows(queries, rows, p.width, to.plain + at * wide, wide);
        check_finite(to.plain + at * wide, rows * wide, finite);
    }

    static void pack_queries(const Problem& p, const Rows& queries, int64_t rows, float* out, float& finite) {
        pack_few(p, queries, rows, out, finite, 0);
        const int64_t wide = TanhAdd::wide(p);
        const Queries to(p, out);
        float largest = 0.0f;
        for (int64_t d = 0; d < wide; d++)
            if (__builtin_fabsf(to.weight[d]) > largest) largest = __builtin_fabsf(to.weight[d]);
        for (int64_t d = 0; d < wide; d++) {
            float w = largest > 0 ? to.weight[d] / largest : 0.0f;
            if (__builtin_fabsf(w) < LEAST) w = LEAST;
            to.inverse[d] = 1.0f / w;
            to.spare[d] = 1.0f + __builtin_log2f(__builtin_fabsf(to.inverse[d]));
        }
        to.numbers[LARGEST_WEIGHT] = (float)(p.scale * largest);
        V within = splat(0.0f);
        for (int64_t d = 0; d < wide; d += LANES) {
            V top = splat(-INFINITY);
            for (int64_t r = 0; r < rows; r++) {
                const V q = load(to.plain + r * wide + d);
                within = max(q < 0 ? -q : q, within);
                top = max(q, top);
                const V raised = raise(q);
                store(to.raised + r * wide + d, raised);
                store(to.folded + r * wide + d, raised * load(to.inverse + d));
            }
            store(to.top + d, top * BITS);
        }
        to.numbers[LARGEST_QUERY] = clearhead::CLEARHEAD_ISA::top(within);
    }

    static void pack_panel(const Problem& p, const Rows& keys, int64_t count, float* panel) {
        const int64_t wide = TanhAdd::wide(p), columns = round_up(count, LANES);
        float* top = panel + PANEL * wide;
        transpose(keys, count, p.width, panel);
        memset(panel + p.width * PANEL, 0, sizeof(float) * (size_t)((wide - p.width) * PANEL));
        V within{};
        for (int64_t d = 0; d < wide; d++) {
            V highest = splat(-INFINITY);
            for (int64_t c = 0; c < columns; c += LANES) {
                const V k = load(panel + d * PANEL + c);
                within = max(k < 0 ? -k : k, within);
                highest = max(k, highest);
                store(panel + d * PANEL + c, raise(k));
            }
            top[d] = clearhead::CLEARHEAD_ISA::top(highest) * BITS;
        }
        top[wide] = clearhead::CLEARHEAD_ISA::top(within);
    }

    static void pack_keys(const Problem& p, const Rows& keys, int64_t count, float* out) {
        const int64_t wide = TanhAdd::wide(p);
        float* plain = out + PANEL * wide;
        copy_rows(keys, count, p.width, plain, wide);
        for (int64_t at = 0; at < count * wide; at += LANES)
            store(out + at, raise(load(plain + at)));
    }

    static float largest_key(const Problem& p, const float* panel) { return panel[(PANEL + 1) * wide(p)]; }
    static bool within(const Problem& p, const Queries& queries, const float* panel) {
        return queries.numbers[LARGEST_QUERY] < REACH && largest_key(p, panel) < REACH;
    }
    static bool near(const Problem& p, const Queries& queries, const float* panel) {
        return queries.numbers[LARGEST_QUERY] + largest_key(p, panel) < NEAR;
    }

    // The form for the scores, where four dimensions share a reciprocal, with w in t.
    static Form score_form(const Problem& p, const Queries& queries, const float* panel) {
        if (near(p, queries, panel)) return SERIES;
        if (queries.numbers[ABSOLUTE_WEIGHTS] > HEAVY) return EXACT;
        if (!within(p, queries, panel)) return DIRECT;
        const float* top = panel + PANEL * wide(p);
        for (int64_t d = 0; d < p.width; d += 4) {
            float bits = 0.0f;
            for (int64_t x = d; x < d + 4; x++) {
                const float reach = queries.top[x] + top[x];
                bits += (reach > 0 ? reach : 0.0f) + queries.spare[x];
                if (queries.top[x] + queries.spare[x] > 126.0f) return CLAMPED;  // A / w alone
            }
            if (bits > 126.0f) return CLAMPED;
        }
        return FOLDED;
    }

    // The form for the gradients, where four queries do, without w; FOLDED is then t as it is.
    static Form gradient_form(const Problem& p, const Queries& queries, const float* panel) {
        if (near(p, queries, panel)) return SERIES;
        if (!within(p, queries, panel)) return DIRECT;
        const float* top = panel + PANEL * wide(p);
        float reach = 0.0f;
        for (int64_t d = 0; d < p.width; d++)
            if (queries.top[d] + top[d] > reach) reach = queries.top[d] + top[d];
        return 4.0f * (reach + 1.0f) < 126.0f ? FOLDED : CLAMPED;
    }

    // e^(2 (q + k)), at most 2^31.
    static INLINE V direct(V both) {
        return exp(min(splat(0.5f * LIMIT_LOG), both), 2.0f);
    }

    template <Form FORM>
    static INLINE V term(float query, V key, float one) {
        V t;
        if constexpr (FORM == DIRECT)
            t = 1.0f + direct(query + key);
        else
            t = query * key + one;
        if constexpr (FORM == CLAMPED) t = min(splat(LIMIT), t);
        return t;
    }

    // sum_h w_h / t_h for some queries and LANES keys.
    template <Form FORM, int QUERIES>
    static INLINE void sum_rows(int64_t wide, int64_t width, const float* queries, const float* factor,
                                const float* panel, float scale, float offset, float* tile) {
        V acc[QUERIES];
        for (int r = 0; r < QUERIES; r++) acc[r] = V{};
        if constexpr (FORM == SERIES || FORM == EXACT) {
            for (int64_t h = 0; h < width; h++) {
                const V key = load(panel + h * PANEL), w = splat(factor[h]);
                for (int r = 0; r < QUERIES; r++) {
                    const V x = queries[r * wide + h] + key;
                    acc[r] += w * (FORM == SERIES ? tanh_near(x) : tanh(x));
                }
            }
            for (int r = 0; r < QUERIES; r++) store(tile + r * PANEL, scale * acc[r]);
            return;
        }
        for (int64_t h = 0; h < width; h += 4) {
            V key[4];
            for (int x = 0; x < 4; x++) key[x] = load(panel + (h + x) * PANEL);
            const float* w = factor + h;
            for (int r = 0; r < QUERIES; r++) {
                V t[4];
                for (int x = 0; x < 4; x++)
                    t[x] = term<FORM>(queries[r * wide + h + x], key[x], FORM == FOLDED ? w[x] : 1.0f);
                const V left = t[0] * t[1], right = t[2] * t[3];
                V above;
                if constexpr (FORM == FOLDED)
                    above = (t[0] + t[1]) * right + (t[2] + t[3]) * left;
                else
                    above = (w[0] * t[1] + w[1] * t[0]) * right + (w[2] * t[3] + w[3] * t[2]) * left;
                acc[r] += above * reciprocal(left * right);
            }
        }
        for (int r = 0; r < QUERIES; r++) store(tile + r * PANEL, offset - scale * acc[r]);
    }

    template <Form FORM>
    static void sums(const Problem& p, const float* queries, const float* factor, const float* panel, const Part& at,
                     float scale, float offset, float* tile) {
        const int64_t wide = TanhAdd::wide(p), width = round_up(p.width, 4);
        for (int64_t c = at.left; c < at.right; c += LANES) {
            int64_t r = at.top;
            for (; r + 4 <= at.bottom; r += 4)
                sum_rows<FORM, 4>(wide, width, queries + r * wide, factor, panel + c, scale, offset, tile + r * PANEL + c);
            for (; r < at.bottom; r++)
                sum_rows<FORM, 1>(wide, width, queries + r * wide, factor, panel + c, scale, offset, tile + r * PANEL + c);
        }
    }

    static void scores(const Problem& p, float* packed, const float* panel, const Rows& keys, const Part& at,
                       float* tile) {
        const Queries queries(p, packed);
        const float offset = queries.numbers[ALL_WEIGHTS], scale = 2.0f * (float)p.scale;
        const Form form = score_form(p, queries, panel);
        if (form != FOLDED && form != CLAMPED) {
            transpose(keys, at.last, p.width, queries.panel);
            memset(queries.panel + p.width * PANEL, 0, sizeof(float) * (size_t)((wide(p) - p.width) * PANEL));
        }
        const float own = (float)p.scale;
        switch (form) {
            case FOLDED:
                sums<FOLDED>(p, queries.folded, queries.inverse, panel, at, 2.0f * queries.numbers[LARGEST_WEIGHT],
                             offset, tile);
                break;
            case CLAMPED:
                sums<CLAMPED>(p, queries.raised, queries.weight, panel, at, scale, offset, tile);
                break;
            case DIRECT:
                sums<DIRECT>(p, queries.plain, queries.weight, queries.panel, at, scale, offset, tile);
                break;
            case SERIES:
                sums<SERIES>(p, queries.plain, queries.weight, queries.panel, at, own, 0.0f, tile);
                break;
            case EXACT:
                sums<EXACT>(p, queries.plain, queries.weight, queries.panel, at, own, 0.0f, tile);
        }
    }

    // The exponential of the sum is taken, key by key, and clamped: right for any numbers, at the speed of memory.
    template <class T>
    static void key_scores(const Problem& p, float* packed, int64_t rows, const T* key, const Prefetch& prefetch, float* tile,
                           V& odd) {
        const Queries queries(p, packed);
        const int64_t wide = TanhAdd::wide(p);
        if (queries.numbers[ABSOLUTE_WEIGHTS] > HEAVY) {
            for (int64_t r = 0; r < rows; r++) {
                V acc{};
                for (int64_t d = 0; d < wide; d += LANES) {
                    prefetch.fetch(key, d);
                    const V k = load(key + d);
                    acc += load(queries.weight + d) * tanh(load(queries.plain + r * wide + d) + k);
                    odd += k;
                }
                tile[r * PANEL] = (float)p.scale * sum(acc);
            }
            return;
        }
        for (int64_t r = 0; r < rows; r++) {
            const float* query = queries.plain + r * wide;
            V acc{};
            int64_t d = 0;
            for (; d + 4 * LANES <= wide; d += 4 * LANES) {
                V k[4], t[4], w[4];
                for (int x = 0; x < 4; x++) {
                    prefetch.fetch(key, d + x * LANES);
                    k[x] = load(key + d + x * LANES), w[x] = load(queries.weight + d + x * LANES);
                    t[x] = 1.0f + direct(load(query + d + x * LANES) + k[x]);
                }
                const V left = t[0] * t[1], right = t[2] * t[3];
                acc += ((w[0] * t[1] + w[1] * t[0]) * right + (w[2] * t[3] + w[3] * t[2]) * left) *
                       reciprocal(left * right);
                odd += k[0] * k[1], odd += k[2] * k[3];
            }
            for (; d < wide; d += LANES) {
                prefetch.fetch(key, d);
                const V k = load(key + d);
                acc += load(queries.weight + d) * reciprocal(1.0f + direct(load(query + d) + k));
                odd += k;
            }
            tile[r * PANEL] = queries.numbers[ALL_WEIGHTS] - 2.0f * (float)p.scale * sum(acc);
        }
    }

    // With r = 1 / t, tanh = 1 - 2 r, and tanh' = 4 (t - 1) r^2, which keeps its digits where r is near 1. For LANES dimensions,
    // four queries (or one) and all keys: four r share a reciprocal. Gives tanh' / 4, and for the weight r, or tanh (SERIES).
    template <Form FORM, int QUERIES>
    static INLINE void pull_rows(const float* queries, const float* keys, int64_t wide, const float* slopes,
                                 const Columns& at, float* to_query, float* to_key, V& to_weight) {
        V acc[QUERIES], query[QUERIES], weight = to_weight;
        for (int r = 0; r < QUERIES; r++) acc[r] = load(to_query + r * wide), query[r] = load(queries + r * wide);
        for (int64_t j = at.first; j < at.last; j++) {
            const V key = load(keys + j * wide);
            V power[QUERIES], t[QUERIES], inverse[QUERIES], back = load(to_key + j * wide);
            if constexpr (FORM == SERIES) {
                for (int r = 0; r < QUERIES; r++) {
                    const V slope = splat(slopes[r * PANEL + j]), th = tanh_near(query[r] + key);
                    const V pull = slope * (0.25f - 0.25f * th * th);
                    acc[r] += pull, back += pull, weight += slope * th;
                }
                store(to_key + j * wide, back);
                continue;
            }
            for (int r = 0; r < QUERIES; r++) {
                power[r] = FORM == DIRECT ? direct(query[r] + key) : query[r] * key;
                if constexpr (FORM == CLAMPED) power[r] = min(splat(LIMIT), power[r]);
                t[r] = 1.0f + power[r];
            }
            if constexpr (QUERIES == 4) {
                const V left = t[0] * t[1], right = t[2] * t[3], all = reciprocal(left * right);
                const V first = all * right, second = all * left;
                inverse[0] = first * t[1], inverse[1] = first * t[0];
                inverse[2] = second * t[3], inverse[3] = second * t[2];
            } else {
                for (int r = 0; r < QUERIES; r++) inverse[r] = reciprocal(t[r]);
            }
            for (int r = 0; r < QUERIES; r++) {
                const V slope = splat(slopes[r * PANEL + j]), bend = power[r] * inverse[r] * inverse[r];
                acc[r] += slope * bend, back += slope * bend, weight += slope * inverse[r];
            }
            store(to_key + j * wide, back);
        }
        for (int r = 0; r < QUERIES; r++) store(to_query + r * wide, acc[r]);
        to_weight = weight;
    }

    template <Form FORM>
    static void pulls(const Problem& p, const float* queries, const float* keys, const float* slopes, const Part& at,
                      float* to_query, float* to_key, double* to_weight) {
        const int64_t wide = TanhAdd::wide(p);
        for (int64_t d = 0; d < wide; d += LANES) {
            V weight{};
            int64_t r = at.top;
            for (; r + 4 <= at.bottom; r += 4)
                pull_rows<FORM, 4>(queries + r * wide + d, keys + d, wide, slopes + r * PANEL, at,
                                   to_query + r * wide + d, to_key + d, weight);
            for (; r < at.bottom; r++)
                pull_rows<FORM, 1>(queries + r * wide + d, keys + d, wide, slopes + r * PANEL, at,
                                   to_query + r * wide + d, to_key + d, weight);
            // in the end `slopes` - 2 sum: that of tanh itself
            for (int x = 0; x < LANES; x++) to_weight[d + x] += FORM == SERIES ? -0.5 * weight[x] : weight[x];
        }
    }

    static void gradients(const Problem& p, float* packed, const float* panel, const float* keys, const float* slopes,
                          const Part& at, float* to_query, float* to_key, double* to_weight, double all) {
        const Queries queries(p, packed);
        const float* plain = keys + PANEL * wide(p);
        const Form form = gradient_form(p, queries, panel);
        if (form != SERIES) to_weight[wide(p)] += all;
        switch (form) {
            case SERIES:
                pulls<SERIES>(p, queries.plain, plain, slopes, at, to_query, to_key, to_weight);
                break;
            case FOLDED:
                pulls<FOLDED>(p, queries.raised, keys, slopes, at, to_query, to_key, to_weight);
                break;
            case CLAMPED:
                pulls<CLAMPED>(p, queries.raised, keys, slopes, at, to_query, to_key, to_weight);
                break;
            default:
                pulls<DIRECT>(p, queries.plain, plain, slopes, at, to_query, to_key, to_weight);
        }
    }

    static float query_factor(const Problem& p, int64_t d) {
        return 4.0f * (float)p.scale * (p.weight ? *p.weight.at<float>(d, 0) : 1.0f);
    }
    static float key_factor(const Problem& p, int64_t d) { return query_factor(p, d); }
    // `slopes`, the sum of all slopes, is 0 but for rounding, sinks and the softcap.
    static double weight_gradient(const Problem& p, double sum, double slopes) { return p.scale * (slopes - 2.0 * sum); }
};

}  // namespace clearhead::CLEARHEAD_ISA
