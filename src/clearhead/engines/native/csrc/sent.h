// The gradients that statistics send back to the weights, beside those of the output (docs/maths/statistics.md).
#pragma once

#include "tile.h"

namespace clearhead::CLEARHEAD_ISA {

// 0, 1, 2, …
INLINE V count_up() {
    V v;
    for (int x = 0; x < LANES; x++) v[x] = (float)x;
    return v;
}

// For one panel of keys of one head, row by row.
struct SentBack {
    const Sent& sent;
    int64_t batch, head, begin, count, cell_row = -1;
    float to_keys[PANEL];  // of `received` and `mean` together, for the rows of `cell_row`

    // `count` keys from `begin` on.
    SentBack(const Sent& sent, int64_t batch, int64_t head, int64_t begin, int64_t count)
        : sent(sent), batch(batch), head(head), begin(begin), count(count) {}

    void fill(int64_t row) {
        cell_row = row;
        memset(to_keys, 0, sizeof to_keys);
        if (sent.received) {
            const float* from = sent.received.at<float>(batch, head) + begin;
            for (int64_t c = 0; c < count; c++) to_keys[c] = from[c];
        }
        if (!sent.mean) return;
        const float* cells = sent.mean.at<float>(batch, head, row);
        for (int64_t c = 0; c < count;) {
            const int64_t cell = (begin + c) / sent.cell_columns, end = min(count, (cell + 1) * sent.cell_columns - begin);
            for (; c < end; c++) to_keys[c] += cells[cell];
        }
    }

    // Adds to the gradients of the weights of query i, upstream[left … right).
    INLINE void add(int64_t i, const Columns& at, float* upstream) {
        if (sent.received || sent.mean) {
            if (i / sent.cell_rows != cell_row) fill(i / sent.cell_rows);
            const float factor = sent.factors ? *sent.factors.at<float>(batch, head, i) : 1.0f;
            for (int64_t c = at.left; c < at.right; c += LANES)
                store(upstream + c, load(upstream + c) + factor * load(to_keys + c));
        }
        if (sent.distance) {
            const float steep = *sent.distance.at<float>(batch, head, i);
            const float from = (float)(begin - *sent.position.at<int64_t>(batch, head, i));
            for (int64_t c = at.left; c < at.right; c += LANES) {
                const V gap = count_up() + ((float)c + from);
                store(upstream + c, load(upstream + c) + steep * max(gap, -gap));
            }
        }
        if (sent.indices) {
            const int64_t *keys = sent.indices.at<int64_t>(batch, head, i), first = begin + at.first, last = begin + at.last;
            const float* values = sent.values.at<float>(batch, head, i);
            int64_t low = 0;
            for (int64_t high = sent.k; low < high;) {
                const int64_t middle = (low + high) / 2;
                if (keys[middle] < first) low = middle + 1;
                else high = middle;
            }
            for (; low < sent.k && keys[low] < last; low++)
                if (keys[low] >= first) upstream[keys[low] - begin] += values[low];  // or they are not in order
        }
    }

    // Adds to the gradients of the scores of query i.
    INLINE void add_to_scores(int64_t i, const Columns& at, float* slope) const {
        if (!sent.best_key) return;
        const int64_t c = *sent.best_key.at<int64_t>(batch, head, i) - begin;
        if (c >= at.first && c < at.last) slope[c] += *sent.best.at<float>(batch, head, i);
    }
};

}  // namespace clearhead::CLEARHEAD_ISA
