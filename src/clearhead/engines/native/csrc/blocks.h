// Which pairs of each block a mask allows: computed once for a mask, and read by all kernels (docs/maths/blocks.md).
#pragma once

#include <algorithm>
#include <vector>

#include "problem.h"

namespace clearhead {

// The keys of a row as bits, from one byte each; `step` apart.
inline uint64_t packed(const uint8_t* keep, int64_t step, int64_t count) {
    uint64_t bits = 0;
    int64_t c = 0;
    if (step == 1)
        for (; c + 8 <= count; c += 8) {
            uint64_t eight;
            __builtin_memcpy(&eight, keep + c, 8);
            eight |= eight >> 4, eight |= eight >> 2, eight |= eight >> 1;  // a byte that is not 0 has its lowest bit
            eight &= 0x0101010101010101ull;
            bits |= ((eight * 0x0102040810204080ull) >> 56) << c;  // gathered in the highest byte, the first lowest
        }
    for (; c < count; c++) bits |= (uint64_t)(keep[c * step] != 0) << c;
    return bits;
}

struct Blocks {
    int64_t batch, heads, queries, keys, tiles, panels;
    std::vector<int32_t> kinds;  // (batch, heads, tiles, panels)
    std::vector<uint64_t> bits;  // (n, ROWS)

    Blocks(int64_t batch, int64_t heads, int64_t queries, int64_t keys)
        : batch(batch), heads(heads), queries(queries), keys(keys), tiles((queries + ROWS - 1) / ROWS),
          panels((keys + PANEL - 1) / PANEL), kinds((size_t)(batch * heads * tiles * panels), NONE) {}

    // The tiles of the queries [first, last), where `first` is the first of a tile. start, stop: int64 (B, H, Lq); gap_start, gap_stop:
    // (B, H, Lq, gaps); keep: uint8 (B, H, last - first, Lk), or none.
    void add(const Array& start, const Array& stop, const Array& gap_start, const Array& gap_stop, int64_t gaps,
             const Array& keep, int64_t first, int64_t last) {
        std::vector<uint64_t> rows((size_t)(ROWS * panels));
        for (int64_t b = 0; b < batch; b++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t tile = first / ROWS; tile * ROWS < last; tile++)
                    one(start, stop, gap_start, gap_stop, gaps, keep, first, std::min(last, (tile + 1) * ROWS), b, h, tile,
                        rows.data());
    }

    void one(const Array& start, const Array& stop, const Array& gap_start, const Array& gap_stop, int64_t gaps,
             const Array& keep, int64_t first, int64_t last, int64_t b, int64_t h, int64_t tile, uint64_t* rows) {
        const int64_t from = tile * ROWS, count = last - from;
        int64_t low = panels, high = 0;  // the panels that some row sees
        for (int64_t r = 0; r < count; r++) {
            const int64_t begin = std::max<int64_t>(*start.at<int64_t>(b, h, from + r), 0);
            const int64_t end = std::min(*stop.at<int64_t>(b, h, from + r), keys);
            if (end <= begin) continue;
            low = std::min(low, begin / PANEL), high = std::max(high, (end + PANEL - 1) / PANEL);
        }
        int32_t* kind = kinds.data() + ((b * heads + h) * tiles + tile) * panels;
        for (int64_t r = 0; r < count; r++) {
            const int64_t i = from + r;
            int64_t begin = std::max<int64_t>(*start.at<int64_t>(b, h, i), 0);
            const int64_t end = std::min(*stop.at<int64_t>(b, h, i), keys);
            uint64_t* row = rows + r * panels;
            for (int64_t at = low; at < high; at++) row[at] = 0;
            for (int64_t g = 0; g <= gaps; g++) {  // the intervals between the gaps
                const int64_t to = g < gaps ? gap_start.at<int64_t>(b, h, i)[g * gap_start.strides[3]] : end;
                const int64_t until = std::min(to, end);
                for (int64_t at = begin / PANEL; at * PANEL < until; at++) row[at] |= inside(begin, until, at * PANEL);
                if (g < gaps) begin = std::max(begin, gap_stop.at<int64_t>(b, h, i)[g * gap_stop.strides[3]]);
            }
            if (!keep) continue;
            const uint8_t* bytes = keep.at<uint8_t>(b, h, i - first);
            for (int64_t at = low; at < high; at++)
                if (row[at]) row[at] &= packed(bytes + at * PANEL * keep.strides[3], keep.strides[3], std::min(PANEL, keys - at * PANEL));
        }
        for (int64_t at = low; at < high; at++) {
            const uint64_t whole = inside(0, keys, at * PANEL);
            uint64_t any = 0, all = whole;
            for (int64_t r = 0; r < count; r++) any |= rows[r * panels + at], all &= rows[r * panels + at];
            if (!any) continue;
            if (all == whole) {
                kind[at] = ALL;
                continue;
            }
            kind[at] = (int32_t)(bits.size() / ROWS);
            for (int64_t r = 0; r < ROWS; r++) bits.push_back(r < count ? rows[r * panels + at] : 0);
        }
    }

    // How many pairs the kernels compute: all pairs of the blocks in which a pair is seen.
    int64_t pairs() const {
        int64_t sum = 0;
        for (size_t i = 0; i < kinds.size(); i++) {
            const int64_t panel = (int64_t)i % panels, tile = (int64_t)i / panels % tiles;
            if (kinds[i] != NONE) sum += std::min(ROWS, queries - tile * ROWS) * std::min(PANEL, keys - panel * PANEL);
        }
        return sum;
    }
};

}  // namespace clearhead
