// The operands' numbers, read as float32 where they lie, whatever their element type is: bfloat16 by a shift, float16 by the
// CPU's instruction. Every number of both types is one of float32.
#pragma once

#include "vector.h"

namespace clearhead::CLEARHEAD_ISA {

typedef uint16_t Bits16 __attribute__((vector_size(2 * LANES)));

INLINE float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE U load_bits(const void* from) {
    Bits16 bits;
    memcpy(&bits, from, sizeof bits);
    return __builtin_convertvector(bits, U);
}

INLINE V load(const Bfloat16* from) { return (V)(load_bits(from) << 16); }

// By integers, so that no mode of the CPU takes subnormal numbers for 0: an exponent of 5 bits becomes one of 8, and a number
// without one is a multiple of 2^-24.
INLINE V load(const Float16* from) {
#ifdef __AVX512F__
    return (V)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    const U bits = load_bits(from), size = bits & 0x7fff, exponent = bits & 0x7c00;
    const U rest = exponent == 0x7c00 ? (size << 13) + (224u << 23) : (size << 13) + (112u << 23);
    const V small = __builtin_convertvector((I)size, V) * 0x1p-24f;
    return (V)((exponent == 0 ? (U)small : rest) | (bits & 0x8000) << 16);
#endif
}

INLINE float number(float x) { return x; }
INLINE float number(Bfloat16 x) { return as_float((uint32_t)x.bits << 16); }
INLINE float number(Float16 x) {
    const uint32_t size = x.bits & 0x7fff, exponent = x.bits & 0x7c00, sign = (uint32_t)(x.bits & 0x8000) << 16;
    const float small = (float)size * 0x1p-24f;
    if (exponent == 0) return sign ? -small : small;
    return as_float(((size << 13) + (exponent == 0x7c00 ? 224u << 23 : 112u << 23)) | sign);
}

// Rows of an operand in memory, `step` numbers apart; their columns stand side by side.
struct Rows {
    const void* data;
    Element element;
    int64_t step;

    Rows(const Array& of, int64_t batch, int64_t head, int64_t first = 0)
        : element(of.element), step(of.strides[2]) {
        if (element == FLOAT32) data = of.at<float>(batch, head, first);
        else data = of.at<uint16_t>(batch, head, first);
    }

    // Those from the i-th on.
    INLINE Rows from(int64_t i) const {
        Rows rows = *this;
        const int64_t size = element == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
        rows.data = static_cast<const char*>(data) + i * step * size;
        return rows;
    }

    // f(the first number's address), a pointer of the element type.
    template <class F>
    INLINE void read(F&& f) const {
        switch (element) {
            case BFLOAT16: return f(static_cast<const Bfloat16*>(data));
            case FLOAT16: return f(static_cast<const Float16*>(data));
            default: return f(static_cast<const float*>(data));
        }
    }
};

}  // namespace clearhead::CLEARHEAD_ISA
