// C += A * B for tiles that are in the cache: the one matrix product of all kernels.
#pragma once

#include "vector.h"

namespace clearhead::CLEARHEAD_ISA {

constexpr int BLOCK_ROWS = 6;                           // rows of C that are in registers at once,
constexpr int BLOCK_VECTORS = LANES == 16 ? 4 : 2;      // and vectors to a row: 24 of AVX-512's 32, 12 of 16 elsewhere

// One block of C in registers. A is read a number at a time, `row` and `step` apart; B by rows of vectors.
template <int ROWS, int VECTORS, bool ADD>
INLINE void product_block(const float* a, int64_t row, int64_t step, const float* b, int64_t b_row, int64_t depth,
                          float* c, int64_t c_row) {
    V acc[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int x = 0; x < VECTORS; x++) acc[i][x] = ADD ? load(c + i * c_row + x * LANES) : V{};
    for (int64_t k = 0; k < depth; k++) {
        V right[VECTORS];
        for (int x = 0; x < VECTORS; x++) right[x] = load(b + k * b_row + x * LANES);
        for (int i = 0; i < ROWS; i++) {
            V left = splat(a[i * row + k * step]);
            for (int x = 0; x < VECTORS; x++) acc[i][x] += left * right[x];
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int x = 0; x < VECTORS; x++) store(c + i * c_row + x * LANES, acc[i][x]);
}

template <int VECTORS, bool ADD>
inline void product_columns(int64_t rows, int64_t depth, const float* a, int64_t row, int64_t step, const float* b,
                            int64_t b_row, float* c, int64_t c_row) {
    int64_t i = 0;
    for (; i + BLOCK_ROWS <= rows; i += BLOCK_ROWS)
        product_block<BLOCK_ROWS, VECTORS, ADD>(a + i * row, row, step, b, b_row, depth, c + i * c_row, c_row);
    for (; i + 2 <= rows; i += 2)
        product_block<2, VECTORS, ADD>(a + i * row, row, step, b, b_row, depth, c + i * c_row, c_row);
    for (; i < rows; i++)
        product_block<1, VECTORS, ADD>(a + i * row, row, step, b, b_row, depth, c + i * c_row, c_row);
}

// C (rows, columns) = or += A (rows, depth) * B (depth, columns); `columns` is a multiple of LANES.
template <bool ADD>
inline void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row, int64_t step,
                    const float* b, int64_t b_row, float* c, int64_t c_row) {
    int64_t x = 0;
    for (; x + BLOCK_VECTORS * LANES <= columns; x += BLOCK_VECTORS * LANES)
        product_columns<BLOCK_VECTORS, ADD>(rows, depth, a, row, step, b + x, b_row, c + x, c_row);
    for (; x + 2 * LANES <= columns; x += 2 * LANES)
        product_columns<2, ADD>(rows, depth, a, row, step, b + x, b_row, c + x, c_row);
    for (; x < columns; x += LANES)
        product_columns<1, ADD>(rows, depth, a, row, step, b + x, b_row, c + x, c_row);
}

}  // namespace clearhead::CLEARHEAD_ISA
