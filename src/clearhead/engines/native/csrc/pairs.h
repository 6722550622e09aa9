// The dot product on pairs of bfloat16. AVX512_BF16 multiplies two numbers by two others, and adds both products to a sum in
// float32: twice as many terms in one instruction.
//
// A product of two bfloat16 numbers is a float32 number, so scores round as they do in float32. The weights and the slopes are
// rounded to bfloat16 where they are multiplied; softmax and its sums are in float32. To the instruction a subnormal number is 0.
#pragma once

#ifdef __AVX512BF16__
#include "mul.h"

namespace clearhead::CLEARHEAD_ISA {

// How product.h multiplies pairs: `depth` and the steps of A count pairs.
struct Pairs {
    static INLINE V repeat(const float* pair) {
        uint32_t bits;
        memcpy(&bits, pair, sizeof bits);
        return (V)(bits - U{});
    }
    static INLINE V add(V sum, V left, V right) {
        return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
    }
    static INLINE V scaled(V sum, float times) { return sum * times; }
};

INLINE void store_pair(float* to, Bfloat16 low, Bfloat16 high) {
    const uint32_t bits = low.bits | (uint32_t)high.bits << 16;
    memcpy(to, &bits, sizeof bits);
}

// Rows of bfloat16 in three layouts, all as pairs:
// each row by itself, times a power of two, [count][(width + 1) / 2]; `finite` becomes NaN where a number is not finite;
inline void copy_pairs(const Rows& rows, int64_t count, int64_t width, float power, float* out, float& finite) {
    const int64_t half = (width + 1) / 2;
    __m512i largest{};  // of the numbers without their signs, whose bits stand in the order of the numbers
    for (int64_t i = 0; i < count; i++) {
        const auto* from = static_cast<const Bfloat16*>(rows.data) + i * rows.step;
        for (int64_t d = 0; d < width; d += 2 * LANES) {
            const int64_t left = min(width - d, 2 * LANES);
            // the numbers past the width are not read, and are 0
            const U pair = (U)_mm512_maskz_loadu_epi16(~0u >> (2 * LANES - left), from + d);
            largest = _mm512_max_epu16(largest, (__m512i)(pair & 0x7fff7fff));
            const U low = (U)((V)(pair << 16) * power), high = (U)((V)(pair & 0xffff0000) * power);
            // a product that is subnormal has bits below those of bfloat16, which belong to the other number
            _mm512_mask_storeu_ps(out + i * half + d / 2, (1u << (left + 1) / 2) - 1, (__m512)(low >> 16 | (high & 0xffff0000)));
        }
    }
    if (_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80))) finite = NAN;
}
// the same transposed, [(width + 1) / 2][PANEL], the columns past `count` zero up to a whole vector;
inline void transpose_pairs(const Rows& rows, int64_t count, int64_t width, float* panel) {
    for (int64_t j = 0; j < count; j += LANES) {
        const int64_t some = min(LANES, count - j), row = rows.step;
        const auto* from = static_cast<const Bfloat16*>(rows.data) + j * row;
        int64_t d = 0;
        for (; 2 * (d + LANES) <= width; d += LANES) {
            V square[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                square[i] = V{};
                if (i < some) memcpy(&square[i], from + i * row + 2 * d, sizeof(V));
            }
            transpose(square);
            for (int64_t i = 0; i < LANES; i++) store(panel + (d + i) * PANEL + j, square[i]);
        }
        for (; 2 * d < width; d++)
            for (int64_t i = 0; i < LANES; i++) {
                const Bfloat16 *pair = from + i * row + 2 * d, none{0};
                store_pair(panel + d * PANEL + j + i, i < some ? pair[0] : none, i < some && 2 * d + 1 < width ? pair[1] : none);
            }
    }
}
// and pairs of rows, [(count + 1) / 2][wide], filled up with zeros.
inline void pair_rows(const Rows& rows, int64_t count, int64_t width, float* out, int64_t wide) {
    for (int64_t i = 0; i < count; i += 2, out += wide) {
        const auto* low = static_cast<const Bfloat16*>(rows.data) + i * rows.step;
        const Bfloat16 *high = i + 1 < count ? low + rows.step : nullptr, none{0};
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES)
            store(out + d, (V)(load_bits(low + d) | (high ? load_bits(high + d) : U{}) << 16));
        for (; d < width; d++) store_pair(out + d, low[d], high ? high[d] : none);
        for (; d < wide; d++) out[d] = 0.0f;
    }
}

// Numbers rounded to bfloat16: those of two vectors in order, and in turns.
INLINE V rounded(V low, V high) { return (V)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
INLINE V in_turns(V low, V high) {
    static constexpr uint16_t ORDER[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (V)_mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), (__m512i)rounded(low, high));
}

// The numbers `at` of a tile as pairs of neighbours in a row, [ROWS][PANEL / 2]; and of neighbours in a column, [ROWS / 2][PANEL],
// where a row that is not in `at` counts as 0.
inline void pair_across(const float* tile, const Part& at, float* out) {
    for (int64_t r = at.top; r < at.bottom; r++)
        for (int64_t c = at.left / (2 * LANES) * 2 * LANES; c < at.right; c += 2 * LANES)
            store(out + r * (PANEL / 2) + c / 2, rounded(load(tile + r * PANEL + c), load(tile + r * PANEL + c + LANES)));
}
inline void pair_down(const float* tile, const Part& at, float* out) {
    for (int64_t i = at.top / 2; 2 * i < at.bottom; i++)
        for (int64_t c = at.left; c < at.right; c += LANES) {
            const float* row = tile + 2 * i * PANEL + c;
            const V low = 2 * i < at.top ? V{} : load(row), high = 2 * i + 1 < at.bottom ? load(row + PANEL) : V{};
            store(out + i * PANEL + c, in_turns(low, high));
        }
}

// Mul on pairs, for a query and key in bfloat16. The products with values are those of float32.
struct MulPairs : Values {
    static constexpr int64_t PANELS = 4;  // to pack a tile of queries for each panel takes a tenth of the time

    // A tile of queries: rows; pairs of rows; and room for the weights or slopes as pairs, in both directions.
    struct Queries {
        float *rows, *pairs, *across, *down;
        Queries(const Problem& p, float* at) : rows(at) {
            pairs = rows + rows_floats(p.width), across = pairs + ROWS / 2 * wide(p), down = across + ROWS * PANEL / 2;
        }
    };

    static int64_t half(int64_t width) { return (width + 1) / 2; }
    static int64_t rows_floats(int64_t width) { return round_up(ROWS * half(width), LANES); }
    static int64_t wide(const Problem& p) { return round_up(p.width, LANES); }
    static int64_t query_floats(const Problem& p) { return rows_floats(p.width) + ROWS / 2 * wide(p) + ROWS * PANEL; }
    static int64_t panel_floats(const Problem& p) { return half(p.width) * PANEL; }
    static int64_t key_floats(const Problem& p) { return PANEL / 2 * wide(p); }

    static void pack_queries(const Problem& p, const Rows& queries, int64_t rows, float* out, float& finite) {
        copy_pairs(queries, rows, p.width, power(p), out, finite);
    }
    static void pack_again(const Problem& p, const Rows& queries, int64_t rows, float* out) {
        pair_rows(queries, rows, p.width, Queries(p, out).pairs, wide(p));
    }
    static void pack_panel(const Problem& p, const Rows& keys, int64_t count, float* panel) {
        transpose_pairs(keys, count, p.width, panel);
    }
    static void pack_keys(const Problem& p, const Rows& keys, int64_t count, float* out) {
        pair_rows(keys, count, p.width, out, wide(p));
    }

    // The scale's power of two, times which a query is a bfloat16 number still; and the rest, from 1 to 2, which comes after the
    // product. So a product that is not finite is one of which the score is not finite.
    static float power(const Problem& p) {
        int exponent;
        __builtin_frexpf((float)p.scale, &exponent);
        return __builtin_ldexpf(1.0f, exponent - 1);
    }
    static void scores(const Problem& p, float* queries, const float* panel, const Rows&, const Part& at, float* tile) {
        const int64_t half = MulPairs::half(p.width);
        product<false, Pairs>(at.rows(), at.width(), half, queries + at.top * half, half, 1, panel + at.left, PANEL,
                              tile + at.top * PANEL + at.left, PANEL, (float)p.scale / power(p));
    }

    // Sums over the keys `at`, and over the rows `at`: the pairs that hold them. A weight or slope of another key in them is 0.
    static void over_keys(const float* across, const Part& at, const float* rows, int64_t wide, float* out) {
        const int64_t from = at.first / 2, to = half(at.last);
        product<true, Pairs>(at.rows(), wide, to - from, across + at.top * (PANEL / 2) + from, PANEL / 2, 1, rows + from * wide,
                             wide, out + at.top * wide, wide);
    }
    static void over_rows(const float* down, const Part& at, const float* rows, int64_t wide, float* out) {
        const int64_t from = at.top / 2, to = half(at.bottom);
        product<true, Pairs>(at.keys(), wide, to - from, down + from * PANEL + at.first, 1, PANEL, rows + from * wide, wide,
                             out + at.first * wide, wide);
    }

    static void gradients(const Problem& p, float* packed, const float*, const float* keys, const float* slopes, const Part& at,
                          float* to_query, float* to_key, double*, double) {
        const Queries queries(p, packed);
        pair_across(slopes, at, queries.across), pair_down(slopes, at, queries.down);
        over_keys(queries.across, at, keys, wide(p), to_query);
        over_rows(queries.down, at, queries.pairs, wide(p), to_key);
    }

    static float query_factor(const Problem& p, int64_t) { return (float)p.scale; }
    static float key_factor(const Problem& p, int64_t) { return (float)p.scale; }
    static double weight_gradient(const Problem&, double, double) { return 0.0; }

    static bool takes(const Problem& p) {
        return p.phi == MUL && p.query.element == BFLOAT16 && p.key.element == BFLOAT16;
    }
};

// The same for values in bfloat16, whose products are on pairs too.
struct ValuePairs : MulPairs {
    static int64_t value_floats(const Problem& p) { return PANEL / 2 * value_wide(p); }
    static void pack_values(const Problem& p, const Rows& values, int64_t count, float* out) {
        pair_rows(values, count, p.value_width, out, value_wide(p));
    }
    static void add_values(const Problem& p, float* queries, const float* weights, const float* values, int64_t, const Part& at,
                           float* out) {
        float* across = Queries(p, queries).across;
        pair_across(weights, at, across);
        over_keys(across, at, values, value_wide(p), out);
    }

    // Gradients of the output are rounded to bfloat16: they come in float32, most of them from an output in bfloat16.
    static int64_t upstream_floats(const Problem& p, const Gradients&) {
        return ROWS * (round_up(p.value_width, 2 * LANES) / 2 * 3 + value_wide(p) / 2);
    }
    static Upstream pack_upstream(const Problem& p, const Gradients&, const Rows& grad, int64_t rows, float* out) {
        const int64_t wide = round_up(p.value_width, 2 * LANES);
        float *across = out + ROWS * wide, *pairs = across + ROWS * wide / 2;
        copy_rows(grad, rows, p.value_width, out, wide);
        for (int64_t i = 0; i < rows * wide; i += 2 * LANES) store(across + i / 2, rounded(load(out + i), load(out + i + LANES)));
        for (int64_t i = 0; 2 * i < rows; i++)
            for (int64_t e = 0; e < value_wide(p); e += LANES) {
                const float* row = out + 2 * i * wide + e;
                store(pairs + i * value_wide(p) + e, in_turns(load(row), 2 * i + 1 < rows ? load(row + wide) : V{}));
            }
        return {across, wide / 2, pairs};
    }
    static int64_t value_panel_floats(const Problem& p) { return half(p.value_width) * PANEL; }
    static void pack_value_panel(const Problem& p, const Rows& values, int64_t count, float* panel) {
        transpose_pairs(values, count, p.value_width, panel);
    }
    static void to_weights(const Problem& p, const Upstream& up, const float* values, const Part& at, float* tile) {
        product<false, Pairs>(at.rows(), at.width(), half(p.value_width), up.rows + at.top * up.step, up.step, 1, values + at.left, PANEL,
                              tile + at.top * PANEL + at.left, PANEL);
    }
    static void to_values(const Problem& p, float* queries, const Upstream& up, const float* weights, const Part& at,
                          float* to_value) {
        float* down = Queries(p, queries).down;
        pair_down(weights, at, down);
        over_rows(down, at, up.pairs, value_wide(p), to_value);
    }

    static bool takes(const Problem& p) { return MulPairs::takes(p) && p.value.element == BFLOAT16; }
};

}  // namespace clearhead::CLEARHEAD_ISA
#endif
