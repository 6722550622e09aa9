// The online softmax, of rows that come in tiles: the sums so far are scaled down when a larger score comes.
#pragma once

#include "tile.h"

namespace clearhead::CLEARHEAD_ISA {

INLINE float exp_of(float x) { return exp(splat(x))[0]; }
INLINE float sink_of(const Problem& p, int64_t head) { return p.sinks ? *p.sinks.at<float>(head, 0) : -INFINITY; }

// The largest of s[left ... right), lane by lane.
INLINE V tops_of(const float* s, int64_t left, int64_t right) {
    V tops = load(s + left);
    for (int64_t c = left + LANES; c < right; c += LANES) tops = max(load(s + c), tops);
    return tops;
}

// The rows of a tile, in units of e^m: m is the largest score so far, -inf at first; at the end the sink, where that is larger.
struct Softmax {
    float largest[ROWS];
    V sums[ROWS];  // over the keys
    bool blind[ROWS];  // at the end: the row may see no key

    INLINE void begin(int64_t r) { largest[r] = -INFINITY, sums[r] = V{}; }

    // Updates m by the largest of some scores. Returns the factor for all that is in units of the old m; `apart`
    // becomes old m - new m.
    INLINE float update_max(int64_t r, V tops, float& apart) {
        const float before = largest[r];
        apart = 0.0f;
        if (!any_above(tops, before)) return 1.0f;
        largest[r] = top(tops);
        if (before == -INFINITY) return 0.0f;
        apart = before - largest[r];
        const float factor = exp_of(apart);
        sums[r] *= factor;
        return factor;
    }

    // After the last key: updates m by the sink. Returns the same as `update_max`.
    INLINE float end(int64_t r, float sink, float& apart) {
        const float before = largest[r];
        apart = 0.0f;
        blind[r] = before == -INFINITY && sum(sums[r]) == 0.0f;  // NaN scores leave m as it is, and make the sum NaN
        if (!(sink > before)) return 1.0f;
        largest[r] = sink;
        if (before == -INFINITY) return 0.0f;
        apart = before - sink;
        const float factor = exp_of(apart);
        sums[r] *= factor;
        return factor;
    }

    INLINE float reference(int64_t r) const { return largest[r] == -INFINITY ? 0.0f : largest[r]; }

    // The softmax's denominator, and 1 over it; 0 where nothing is seen.
    INLINE float total(int64_t r, float sink) const {
        const float keys = sum(sums[r]);
        return sink == -INFINITY ? keys : keys + exp_of(sink - largest[r]);
    }
    static INLINE float inverse(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }
};

}  // namespace clearhead::CLEARHEAD_ISA
