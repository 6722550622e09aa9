// The products with the values and with their gradients, in float32: the scores inherit them. pairs.h has others, with the same
// members.
#pragma once

#include "product.h"
#include "tile.h"

namespace clearhead::CLEARHEAD_ISA {

INLINE int64_t value_wide(const Problem& p) { return round_up(p.value_width, LANES); }

// `count` rows to [width][PANEL], the columns past `count` zero up to a whole vector.
template <class T>
INLINE void transpose(const T* rows, int64_t row, int64_t count, int64_t width, float* panel) {
    for (int64_t j = 0; j < count; j += LANES) {
        const int64_t some = min(LANES, count - j);
        const T* from = rows + j * row;
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES) {
            V square[LANES];
            for (int64_t i = 0; i < LANES; i++) square[i] = i < some ? load(from + i * row + d) : V{};
            transpose(square);
            for (int64_t i = 0; i < LANES; i++) store(panel + (d + i) * PANEL + j, square[i]);
        }
        for (; d < width; d++)
            for (int64_t i = 0; i < LANES; i++) panel[d * PANEL + j + i] = i < some ? number(from[i * row + d]) : 0.0f;
    }
}
inline void transpose(const Rows& rows, int64_t count, int64_t width, float* panel) {
    rows.read([&](const auto* first) { transpose(first, rows.step, count, width, panel); });
}

// `count` rows to rows of `wide` floats, filled up with zeros.
template <class T>
INLINE void copy_rows(const T* rows, int64_t row, int64_t count, int64_t width, float* out, int64_t wide) {
    for (int64_t i = 0; i < count; i++) {
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES) store(out + i * wide + d, load(rows + i * row + d));
        for (; d < width; d++) out[i * wide + d] = number(rows[i * row + d]);
        for (; d < wide; d++) out[i * wide + d] = 0.0f;
    }
}
inline void copy_rows(const Rows& rows, int64_t count, int64_t width, float* out, int64_t wide) {
    rows.read([&](const auto* first) { copy_rows(first, rows.step, count, width, out, wide); });
}

// Gradients of the output in a tile of queries, as the products read them: rows, and pairs of rows where pairs.h reads them.
struct Upstream {
    const float* rows = nullptr;
    int64_t step = 0;
    const float* pairs = nullptr;
};

struct Values {
    static constexpr int64_t PANELS = 1;  // that a backward pass reads at once (backward.h)

    // A panel of values that is packed once for all tiles; 0: none is. Values in float32 are read where they lie if their width is a
    // multiple of LANES, and those of 16 bits are copied tile by tile (forward.h).
    static int64_t value_floats(const Problem& p) {
        return p.value.data && p.value.element == FLOAT32 && p.value_width != value_wide(p) ? PANEL * value_wide(p) : 0;
    }
    static void pack_values(const Problem& p, const Rows& values, int64_t count, float* out) {
        copy_rows(values, count, p.value_width, out, value_wide(p));
    }

    // out += weights * values for the rows and keys `at`. `values`: rows of the panel, `step` apart. The argument without a name: the
    // packed queries.
    static void add_values(const Problem& p, float*, const float* weights, const float* values, int64_t step, const Part& at,
                           float* out) {
        product<true>(at.rows(), value_wide(p), at.keys(), weights + at.top * PANEL + at.first, PANEL, 1,
                      values + at.first * step, step, out + at.top * value_wide(p), value_wide(p));
    }

    // Gradients of the output, and a panel of values: as they are read by the two products below.
    static int64_t upstream_floats(const Problem& p, const Gradients& g) { return copies(p, g) ? ROWS * value_wide(p) : 0; }
    static Upstream pack_upstream(const Problem& p, const Gradients& g, const Rows& grad, int64_t rows, float* out) {
        if (!copies(p, g)) return {static_cast<const float*>(grad.data), grad.step};
        copy_rows(grad, rows, p.value_width, out, value_wide(p));
        return {out, value_wide(p)};
    }
    static bool copies(const Problem& p, const Gradients& g) {
        return p.value_width != value_wide(p) || g.grad.element != FLOAT32;
    }
    static int64_t value_panel_floats(const Problem& p) { return p.value_width * PANEL; }
    static void pack_value_panel(const Problem& p, const Rows& values, int64_t count, float* panel) {
        transpose(values, count, p.value_width, panel);
    }

    // The gradients of the weights `at`.
    static void to_weights(const Problem& p, const Upstream& up, const float* values, const Part& at, float* tile) {
        product<false>(at.rows(), at.width(), p.value_width, up.rows + at.top * up.step, up.step, 1, values + at.left, PANEL,
                       tile + at.top * PANEL + at.left, PANEL);
    }

    // Adds the gradients of the values.
    static void to_values(const Problem& p, float*, const Upstream& up, const float* weights, const Part& at, float* to_value) {
        product<true>(at.keys(), value_wide(p), at.rows(), weights + at.top * PANEL + at.first, 1, PANEL,
                      up.rows + at.top * up.step, up.step, to_value + at.first * value_wide(p), value_wide(p));
    }

    // What the gradients read of queries beside that which the scores do.
    static void pack_again(const Problem&, const Rows&, int64_t, float*) {}
};

}  // namespace clearhead::CLEARHEAD_ISA
