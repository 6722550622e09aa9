// The matrix product of all kernels, C += A * B: by blocks of C where the tiles are in the cache, and row by row of B where
// B comes from memory.
#pragma once

#include "elements.h"

namespace clearhead::CLEARHEAD_ISA {

constexpr int BLOCK_ROWS = 6;                           // rows of C that are in registers at once,
constexpr int BLOCK_VECTORS = LANES == 16 ? 4 : 2;      // and vectors to a row: 24 of AVX-512's 32, 12 of 16 elsewhere

// How numbers of float32 are multiplied. pairs.h has another way, with the same members.
struct Numbers {
    static INLINE V repeat(const float* number) { return splat(*number); }
    static INLINE V add(V sum, V left, V right) { return sum + left * right; }
    static INLINE V scaled(V sum, float) { return sum; }
};

// One block of C in registers. A is read a number at a time, `row` and `step` apart; B by rows of vectors.
template <int ROWS, int VECTORS, bool ADD, class Of>
INLINE void product_block(const float* a, int64_t row, int64_t step, const float* b, int64_t b_row, int64_t depth,
                          float* c, int64_t c_row, float times) {
    V acc[ROWS][VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int x = 0; x < VECTORS; x++) acc[i][x] = V{};
    for (int64_t k = 0; k < depth; k++) {
        V right[VECTORS];
        for (int x = 0; x < VECTORS; x++) right[x] = load(b + k * b_row + x * LANES);
        for (int i = 0; i < ROWS; i++) {
            V left = Of::repeat(a + i * row + k * step);
            for (int x = 0; x < VECTORS; x++) acc[i][x] = Of::add(acc[i][x], left, right[x]);
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int x = 0; x < VECTORS; x++) {
            float* to = c + i * c_row + x * LANES;  // long sums of short ones round less than one running sum
            store(to, ADD ? load(to) + acc[i][x] : Of::scaled(acc[i][x], times));
        }
}

template <int VECTORS, bool ADD, class Of>
inline void product_columns(int64_t rows, int64_t depth, const float* a, int64_t row, int64_t step, const float* b,
                            int64_t b_row, float* c, int64_t c_row, float times) {
    constexpr int MANY = VECTORS == 1 ? 2 * BLOCK_ROWS : BLOCK_ROWS;  // as many sums as hide an addition's latency
    int64_t i = 0;
    for (; i + MANY <= rows; i += MANY)
        product_block<MANY, VECTORS, ADD, Of>(a + i * row, row, step, b, b_row, depth, c + i * c_row, c_row, times);
    for (; i + 2 <= rows; i += 2)
        product_block<2, VECTORS, ADD, Of>(a + i * row, row, step, b, b_row, depth, c + i * c_row, c_row, times);
    for (; i < rows; i++)
        product_block<1, VECTORS, ADD, Of>(a + i * row, row, step, b, b_row, depth, c + i * c_row, c_row, times);
}

// C (rows, columns) += A (rows, depth) * B (depth, columns), or = `times` that product; `columns` is a multiple of LANES.
template <bool ADD, class Of = Numbers>
inline void product(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row, int64_t step,
                    const float* b, int64_t b_row, float* c, int64_t c_row, float times = 1.0f) {
    int64_t x = 0;
    for (; x + BLOCK_VECTORS * LANES <= columns; x += BLOCK_VECTORS * LANES)
        product_columns<BLOCK_VECTORS, ADD, Of>(rows, depth, a, row, step, b + x, b_row, c + x, c_row, times);
    for (; x + 2 * LANES <= columns; x += 2 * LANES)
        product_columns<2, ADD, Of>(rows, depth, a, row, step, b + x, b_row, c + x, c_row, times);
    for (; x < columns; x += LANES)
        product_columns<1, ADD, Of>(rows, depth, a, row, step, b + x, b_row, c + x, c_row, times);
}

// DEPTH rows of B at once, from end to end as they lie in memory, into ROWS rows of C.
template <int ROWS, int DEPTH, class T>
INLINE void product_rows(int64_t columns, const float* a, int64_t row, const T* b, int64_t b_row, float* c,
                         int64_t c_row) {
    V left[ROWS][DEPTH];
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < DEPTH; k++) left[i][k] = splat(a[i * row + k]);
    for (int64_t x = 0; x < columns; x += LANES) {
        V right[DEPTH];
        for (int k = 0; k < DEPTH; k++) right[k] = load(b + k * b_row + x);
        for (int i = 0; i < ROWS; i++) {
            V acc = load(c + i * c_row + x);
            for (int k = 0; k < DEPTH; k++) acc += left[i][k] * right[k];
            store(c + i * c_row + x, acc);
        }
    }
}

template <int DEPTH, class T>
INLINE void product_rows(int64_t rows, int64_t columns, const float* a, int64_t row, const T* b, int64_t b_row,
                         float* c, int64_t c_row) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) product_rows<4, DEPTH>(columns, a + i * row, row, b, b_row, c + i * c_row, c_row);
    for (; i < rows; i++) product_rows<1, DEPTH>(columns, a + i * row, row, b, b_row, c + i * c_row, c_row);
}

// C += A * B for few rows of C; B may be of any element type.
template <class T>
inline void product_by_rows(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row, const T* b,
                            int64_t b_row, float* c, int64_t c_row) {
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) product_rows<4>(rows, columns, a + k, row, b + k * b_row, b_row, c, c_row);
    for (; k < depth; k++) product_rows<1>(rows, columns, a + k, row, b + k * b_row, b_row, c, c_row);
}

}  // namespace clearhead::CLEARHEAD_ISA
