// A vector register in portable C++ (the vector types of GCC and Clang), as wide as the instruction set that this file is
// compiled for. Arrays of them stay in registers (product.h), which plain loops over arrays do not ensure.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <utility>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "problem.h"

// No function of the standard C++ library is used below this line: its templates have one name in all builds, and the
// linker could give a CPU without AVX-512 the copy that was compiled for it.
namespace clearhead::CLEARHEAD_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));

#define INLINE inline __attribute__((always_inline))

INLINE int64_t thread() { return omp_get_thread_num(); }
INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

INLINE V load(const float* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}
INLINE I load(const int32_t* from) {
    I v;
    memcpy(&v, from, sizeof v);
    return v;
}
INLINE void store(int32_t* to, I v) { memcpy(to, &v, sizeof v); }
INLINE void store(float* to, V v) { memcpy(to, &v, sizeof v); }
INLINE V splat(float x) { return x - V{}; }

// b where one is NaN. GCC reverses the condition where an operand is constant, and then needs a compare and a blend.
#ifdef __AVX512F__
INLINE V max(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE V min(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE V max(V a, V b) { return a > b ? a : b; }
INLINE V min(V a, V b) { return a < b ? a : b; }
#endif

// Reductions over all lanes, by halves: shuffles, no stores.
typedef float V4 __attribute__((vector_size(16)));
typedef float V8 __attribute__((vector_size(32)));
typedef float V16 __attribute__((vector_size(64)));
INLINE V8 low(V16 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE V8 high(V16 v) { return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE V4 low(V8 v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
INLINE V4 high(V8 v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }

INLINE float sum(V4 v) {
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1);
    return v[0] + v[1];
}
INLINE float top(V4 v) {
    const V4 other = __builtin_shufflevector(v, v, 2, 3, 0, 1);
    v = v > other ? v : other;
    return v[0] > v[1] ? v[0] : v[1];
}
// Each lane's left neighbour, and `first` in the first.
INLINE V4 pushed(V4 v, float first) {
    v = __builtin_shufflevector(v, v, 0, 0, 1, 2);
    v[0] = first;
    return v;
}
INLINE V8 pushed(V8 v, float first) {
    v = __builtin_shufflevector(v, v, 0, 0, 1, 2, 3, 4, 5, 6);
    v[0] = first;
    return v;
}
INLINE V16 pushed(V16 v, float first) {
    v = __builtin_shufflevector(v, v, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14);
    v[0] = first;
    return v;
}
// LANES vectors as the rows of a square, transposed: in each of its parts of twice STEP rows, the blocks off the diagonal change
// places, down to single numbers.
template <int STEP, int... X>
INLINE void exchange(V& upper, V& lower, std::integer_sequence<int, X...>) {
    const V first = __builtin_shufflevector(upper, lower, ((X & STEP) ? LANES + X - STEP : X)...);
    lower = __builtin_shufflevector(upper, lower, ((X & STEP) ? LANES + X : X + STEP)...);
    upper = first;
}
template <int STEP = LANES / 2>
INLINE void transpose(V* rows) {
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) exchange<STEP>(rows[i], rows[i + STEP], std::make_integer_sequence<int, LANES>());
    if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}

template <class W>
INLINE float sum(W v) { return sum(low(v) + high(v)); }
template <class W>
INLINE float top(W v) { return top(low(v) > high(v) ? low(v) : high(v)); }

// The lanes that are above a number, as bits; NaN is not. AVX-512 has them from one compare.
INLINE uint32_t above(V v, float limit) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ);
#else
    uint32_t bits = 0;
    for (int x = 0; x < LANES; x++) bits |= (uint32_t)(v[x] > limit) << x;
    return bits;
#endif
}
// The lanes that are equal to a number, as bits.
INLINE uint32_t equal(V v, float number) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(number), _CMP_EQ_OQ);
#else
    uint32_t bits = 0;
    for (int x = 0; x < LANES; x++) bits |= (uint32_t)(v[x] == number) << x;
    return bits;
#endif
}
INLINE bool any_above(V v, float limit) {
#ifdef __AVX512F__
    return above(v, limit) != 0;
#else
    return top(v) > limit;
#endif
}

// 0 in place of subnormal numbers: on many CPUs each product with one takes some hundred cycles.
INLINE V flush(V x) { return ((U)x & 0x7f800000) == 0 ? V{} : x; }

// e^(times * x) for times * x <= 88; 0 where it would be subnormal, below 2^-126; NaN stays NaN (docs/maths/softmax.md).
#ifdef __AVX512F__
// 2^y = 2^floor(y) 2^r: AVX-512 has an instruction for the rest r and one for the power. The power is computed only where it is a
// normal number, because to make a subnormal one is slow too.
INLINE V exp(V x, float times = 1.0f) {
    const V y = x * (times * 1.44269504f), r = (V)_mm512_reduce_ps((__m512)y, 1);
    V p = r * 2.18657848e-4f + 1.23913318e-3f;
    p = p * r + 9.68418631e-3f;
    p = p * r + 5.54806302e-2f;
    p = p * r + 2.40230454e-1f;
    p = p * r + 6.93146933e-1f;
    p = p * r + 1.0f;
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)y, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (V)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)y);
}
#else
// times * x = n log 2 + r, |r| <= log(2) / 2.
INLINE V exp(V x, float times = 1.0f) {
    const float shift = 12582912.0f + 127.0f;  // 1.5 * 2^23: its last bits count in ones; and the exponent's offset
    x = times == 1.0f ? x : times * x;
    x = x < -87.336f ? splat(-88.0f) : x;  // of which the exponent's bits are 0
    const V t = x * 1.44269504f + shift, n = t - shift;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = r * 1.39262508e-3f + 8.36323288e-3f;
    p = p * r + 4.16665542e-2f;
    p = p * r + 1.66665767e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (V)((U)t << 23);
}
#endif

constexpr float NEAR = 0.625f;

// tanh for |x| < NEAR, by its series: with all its digits, however small x is.
INLINE V tanh_near(V x) {
    const V square = x * x;
    V p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    return x + x * (square * p);
}

// tanh: elsewhere 1 - 2 / (1 + e^2x).
INLINE V tanh(V x) {
    V size = x < 0 ? -x : x;
    V far = 1.0f - 2.0f / (1.0f + exp(2.0f * (size > 12.0f ? splat(12.0f) : size)));
    return size < NEAR ? tanh_near(x) : (x < 0 ? -far : far);
}

// 1 / x for 1 <= |x| < 2^126. On AVX-512 an estimate and one Newton step, which is faster than a division.
INLINE V reciprocal(V x) {
#ifdef __AVX512F__
    V r = (V)_mm512_rcp14_ps((__m512)x);
    return r + r * (1.0f - x * r);
#else
    return 1.0f / x;
#endif
}

}  // namespace clearhead::CLEARHEAD_ISA
