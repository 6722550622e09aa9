// Which blocks have a pair that a mask allows, and which pairs where it has a residual: found once for a mask, and read by all
// kernels (docs/maths/blocks.md).
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
    int64_t batch, heads, queries, keys, tiles;
    std::vector<Runs> of_tile;   // (batch, heads, tiles)
    std::vector<Run> runs;
    std::vector<uint64_t> bits;  // (n, ROWS)

    Blocks(int64_t batch, int64_t heads, int64_t queries, int64_t keys)
        : batch(batch), heads(heads), queries(queries), keys(keys), tiles((queries + ROWS - 1) / ROWS),
          of_tile((size_t)(batch * heads * tiles), Runs{0, 0}) {}

    // The tiles of the queries [first, last), where `first` is the first of a tile. start, stop: int64 (B, H, Lq); gap_start, gap_stop:
    // (B, H, Lq, gaps); keep: uint8 (B, H, last - first, last_key - first_key), or none. These queries see none of the other keys.
    void add(const Array& start, const Array& stop, const Array& gap_start, const Array& gap_stop, int64_t gaps,
             const Array& keep, int64_t first_key, int64_t last_key, int64_t first, int64_t last) {
        std::vector<Interval> intervals;  // of the rows of a tile, in panels
        for (int64_t b = 0; b < batch; b++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t tile = first / ROWS; tile * ROWS < last; tile++) {
                    const int64_t from = tile * ROWS, count = std::min(last - from, ROWS);
                    const auto each = [&](int64_t r, auto take) {  // the intervals of a row, between its gaps
                        int64_t begin = std::max(*start.at<int64_t>(b, h, from + r), first_key);
                        const int64_t end = std::min(*stop.at<int64_t>(b, h, from + r), last_key);
                        const int64_t *low = gap_start.at<int64_t>(b, h, from + r), *high = gap_stop.at<int64_t>(b, h, from + r);
                        for (int64_t g = 0; g < gaps; g++) {
                            const int64_t until = std::min(low[g * gap_start.strides[3]], end);
                            if (until > begin) take(begin, until);
                            begin = std::max(begin, high[g * gap_stop.strides[3]]);
                        }
                        if (end > begin) take(begin, end);
                    };
                    const auto kept = [&](int64_t r, int64_t panel) {
                        const uint8_t* bytes = keep.at<uint8_t>(b, h, from + r - first) + (panel * PANEL - first_key) * keep.strides[3];
                        return packed(bytes, keep.strides[3], std::min(PANEL, last_key - panel * PANEL));
                    };
                    add_tile((b * heads + h) * tiles + tile, count, each, kept, (bool)keep, intervals);
                }
    }

    // How many pairs the kernels compute: all pairs of the blocks in which a pair is seen.
    int64_t pairs() const {
        int64_t sum = 0;
        for (size_t i = 0; i < of_tile.size(); i++) {
            const int64_t rows = std::min(ROWS, queries - (int64_t)i % tiles * ROWS);
            for (int64_t n = of_tile[i].begin; n < of_tile[i].end; n++)
                sum += rows * (std::min(keys, runs[n].last * PANEL) - runs[n].first * PANEL);
        }
        return sum;
    }

    size_t bytes() const { return sizeof(Runs) * of_tile.size() + sizeof(Run) * runs.size() + 8 * bits.size(); }

  private:
    struct Interval {
        int64_t first, last;

        bool operator<(const Interval& other) const { return first < other.first; }
    };

    // A tile of `rows` queries. `each(r, take)` gives the intervals of row r to `take`, and `kept(r, panel)` the keys of a panel
    // that its residual keeps, as bits.
    template <class Each, class Kept>
    void add_tile(int64_t tile, int64_t rows, const Each& each, const Kept& kept, bool residual, std::vector<Interval>& intervals) {
        intervals.clear();
        for (int64_t r = 0; r < rows; r++)
            each(r, [&](int64_t begin, int64_t end) {
                const Interval panels{begin / PANEL, (end + PANEL - 1) / PANEL};
                for (const Interval& known : intervals)  // those of the row before, for most rows
                    if (known.first <= panels.first && known.last >= panels.last) return;
                intervals.push_back(panels);
            });
        std::sort(intervals.begin(), intervals.end());
        of_tile[tile].begin = (int64_t)runs.size();
        int64_t panel = 0;
        for (const Interval& some : intervals)
            for (panel = std::max(panel, some.first); panel < some.last; panel++) {
                const uint64_t whole = inside(0, keys, panel * PANEL);
                uint64_t block[ROWS] = {}, any = 0, all = whole;
                for (int64_t r = 0; r < rows; r++) {
                    each(r, [&](int64_t begin, int64_t end) { block[r] |= inside(begin, end, panel * PANEL); });
                    if (residual && block[r]) block[r] &= kept(r, panel);
                    any |= block[r], all &= block[r];
                }
                if (!any) continue;
                if (all == whole) {
                    append(of_tile[tile].begin, panel, ALL);
                } else if (!residual) {
                    append(of_tile[tile].begin, panel, BY_SPANS);
                } else {
                    append(of_tile[tile].begin, panel, (int32_t)(bits.size() / ROWS));
                    bits.insert(bits.end(), block, block + ROWS);
                }
            }
        of_tile[tile].end = (int64_t)runs.size();
    }

    // Adds a block to the last run, if it continues it, or as a run of its own. `begin`: the first run of its tile.
    void append(int64_t begin, int64_t panel, int32_t kind) {
        if ((int64_t)runs.size() > begin && runs.back().last == panel && runs.back().kind_at(panel) == kind) runs.back().last++;
        else runs.push_back(Run{(int32_t)panel, (int32_t)panel + 1, kind});
    }
};

}  // namespace clearhead
