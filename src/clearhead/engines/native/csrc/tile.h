// A tile of scores between the product of queries and keys and the softmax: the same steps for every score.
#pragma once

#include "elements.h"

namespace clearhead::CLEARHEAD_ISA {


// A number is finite if it times 0 is 0. `sign` is kept as it is if all are, and becomes NaN otherwise.
INLINE void check_finite(const float* numbers, int64_t count, float& sign) {
    float zero = 0.0f;
#pragma omp simd reduction(+ : zero)
    for (int64_t i = 0; i < count; i++) zero += numbers[i] * 0.0f;
    sign += zero;
}
template <class T>
INLINE void check_finite(const T* numbers, int64_t count, float& sign) {
    V zero{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) zero += load(numbers + i) * 0.0f;
    for (; i < count; i++) sign += number(numbers[i]) * 0.0f;
    sign += sum(zero);
}

// Which keys each query of a tile sees, and their hull. A query that sees nothing has start = stop = 0.
struct RowSpans {
    int64_t start[ROWS], stop[ROWS];
    int64_t low, high;
    int64_t all_from, all_to;  // the keys that all queries see

    explicit RowSpans(const Problem& p) : low(p.keys), high(0), all_from(0), all_to(p.keys) {}

    // Query i of a head, as row r of the tile.
    INLINE void add(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t r) {
        int64_t from = p.start ? *p.start.at<int64_t>(batch, head, i) : 0;
        int64_t to = p.stop ? *p.stop.at<int64_t>(batch, head, i) : p.keys;
        if (from < 0) from = 0;
        if (to > p.keys) to = p.keys;
        if (to <= from) from = to = 0;
        else low = min(low, from), high = max(high, to);
        start[r] = from, stop[r] = to;
        all_from = max(all_from, from), all_to = min(all_to, to);
    }

    RowSpans(const Problem& p, int64_t batch, int64_t head, int64_t first, int64_t rows) : RowSpans(p) {
        for (int64_t r = 0; r < rows; r++) add(p, batch, head, first + r, r);
    }
};

// A panel of keys, and which of its pairs with a tile of queries are seen.
struct Block {
    int64_t panel;
    int32_t kind;
};

// `next_block` of a map. It is no part of the loops over panels: most masks have no map.
__attribute__((noinline)) inline Block next_of_map(const Problem& p, const Runs& of, int64_t panel) {
    const Run *run = p.runs + of.begin, *end = p.runs + of.end;
    for (int64_t count = end - run; count > 0;) {  // the first run that ends after the panel
        const int64_t half = count / 2;
        if (run[half].last <= panel) run += half + 1, count -= half + 1;
        else count = half;
    }
    if (run == end) return {(p.keys + PANEL - 1) / PANEL, NONE};
    const int64_t at = max(panel, run->first);
    return {at, run->kind_at(at)};
}

// The first block of a tile, from a panel on, in which a pair is seen. Without a map it is the panel's, seen by the spans. After the
// last block, its panel is the number of panels.
INLINE Block next_block(const Problem& p, int64_t batch, int64_t head, int64_t tile, int64_t panel) {
    return p.tiles ? next_of_map(p, *p.tiles.at<Runs>(batch, head, tile), panel) : Block{panel, BY_SPANS};
}

// Which pairs of a tile of queries with a panel of keys are seen.
INLINE int32_t kind_of(const Problem& p, int64_t batch, int64_t head, int64_t tile, int64_t panel) {
    const Block block = next_block(p, batch, head, tile, panel);
    return block.panel == panel ? block.kind : NONE;
}

// The keys of a panel in the gaps of query i, as bits.
__attribute__((noinline)) inline uint64_t keys_in_gaps(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t begin) {
    uint64_t bits = 0;
    for (int64_t g = 0; g < p.gaps; g++)
        bits |= inside(p.gap_start.at<int64_t>(batch, head, i)[g * p.gap_start.strides[3]],
                       p.gap_stop.at<int64_t>(batch, head, i)[g * p.gap_stop.strides[3]], begin);
    return bits;
}

// The keys of a panel that query i of a head sees, those from `begin` on, as bits. `kind`: of its block; `start`, `stop`: its span.
INLINE uint64_t keys_seen(const Problem& p, int32_t kind, int64_t batch, int64_t head, int64_t i, int64_t begin,
                          int64_t start, int64_t stop) {
    if (kind >= 0) return p.bits[kind * ROWS + i % ROWS];
    if (kind != BY_SPANS) return kind == ALL ? inside(begin, p.keys, begin) : 0;
    const uint64_t bits = inside(start, stop, begin);
    return p.gaps ? bits & ~keys_in_gaps(p, batch, head, i, begin) : bits;
}

// Some keys of a panel, [first, last), and the columns [left, right) of whole vectors that hold them.
struct Columns {
    int64_t left, right, first, last;

    Columns() = default;
    Columns(int64_t low, int64_t high, int64_t panel) {
        const int64_t begin = panel * PANEL;
        first = max(low - begin, 0), last = min(high - begin, PANEL);
        left = first / LANES * LANES, right = round_up(last, LANES);
    }
};

// The rows [top, bottom) of a tile of queries, with some keys of a panel.
struct Part : Columns {
    int64_t top, bottom;

    int64_t rows() const { return bottom - top; }
    int64_t keys() const { return last - first; }
    int64_t width() const { return right - left; }
};

// The part of a block, a tile of queries with a panel of keys, that is computed: strips of some rows, each with the hull of
// the keys that they see, so that little is computed where an edge of the mask runs through the block. Strips of the same
// columns are one part.
struct Parts {
    static constexpr int64_t STRIP = 12;

    Part part[(ROWS + STRIP - 1) / STRIP];
    int64_t count = 0;
    bool whole = false;  // all rows, with all that the tile sees of the panel

    // `kind` is of the rows before `cut`, `next` of the others: a tile may lie in two of the map's.
    Parts(const Problem& p, const RowSpans& spans, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t panel,
          int32_t kind, int32_t next, int64_t cut) {
        const int64_t begin = panel * PANEL, end = min(begin + PANEL, p.keys);
        if (begin >= spans.high || end <= spans.low || (kind == NONE && next == NONE)) return;
        const auto all = [&](int32_t k) {
            return k == ALL || (k == BY_SPANS && !p.gaps && spans.all_from <= begin && spans.all_to >= end);
        };
        if (all(kind) && all(next)) {
            add(Columns(spans.low, spans.high, panel), 0, rows);
            whole = true;
            return;
        }
        uint64_t bits[ROWS];
        int64_t top = rows, bottom = 0;
        for (int64_t r = 0; r < rows; r++) {
            bits[r] = keys_seen(p, r < cut ? kind : next, batch, head, first + r, begin, spans.start[r], spans.stop[r]);
            if (bits[r]) top = min(top, r), bottom = r + 1;
        }
        for (int64_t from = top; from < bottom; from += STRIP) {
            const int64_t to = min(from + STRIP, bottom);
            uint64_t any = 0;
            for (int64_t r = from; r < to; r++) any |= bits[r];
            if (any) add(Columns(__builtin_ctzll(any), PANEL - __builtin_clzll(any), 0), from, to);
        }
    }
    Parts(const Problem& p, const RowSpans& spans, int64_t batch, int64_t head, int64_t first, int64_t rows, const Block& block)
        : Parts(p, spans, batch, head, first, rows, block.panel, block.kind, block.kind, rows) {}

    const Part* begin() const { return part; }
    const Part* end() const { return part + count; }

    void add(const Columns& at, int64_t top, int64_t bottom) {
        Part* last = count ? part + count - 1 : nullptr;
        if (last && last->bottom == top && last->left == at.left && last->right == at.right) {
            last->first = min(last->first, at.first), last->last = max(last->last, at.last), last->bottom = bottom;
            return;
        }
        Part& to = part[count++];
        static_cast<Columns&>(to) = at, to.top = top, to.bottom = bottom;
    }
};

// Of s[left ... right), those whose bit is 0 become -inf.
inline void keep_bits(uint64_t bits, const Columns& at, float* s) {
    U lane;
    for (int x = 0; x < LANES; x++) lane[x] = 1u << x;
    for (int64_t c = at.left; c < at.right; c += LANES) {
        const I kept = (I)(((U{} + (uint32_t)(bits >> c)) & lane) != 0);
        store(s + c, kept ? load(s + c) : splat(-INFINITY));
    }
}

inline void epilogue(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t begin, const Columns& at,
                     int64_t start, int64_t stop, int32_t kind, float* s, float* capped) {
    if (p.softcap > 0) {
        const float cap = (float)p.softcap;
        for (int64_t c = at.left; c < at.right; c += LANES) {
            V t = cap * tanh(load(s + c) * (1.0f / cap));
            store(s + c, t);
            if (capped) store(capped + c, t);
        }
    }
    if (p.dense)
        Rows(p.dense, batch, head, i).read([&](const auto* row) {
            const int64_t step = p.dense.strides[3];
            const auto* add = row + begin * step;
            int64_t c = at.first;
            for (; step == 1 && c + LANES <= at.last; c += LANES) store(s + c, load(s + c) + load(add + c));
            for (; c < at.last; c++) s[c] += number(add[c * step]);
        });
    if (p.relative) {
        const float* add = p.relative.at<float>(batch, head) + begin - i + p.queries - 1;
        for (int64_t c = at.first; c < at.last; c++) s[c] += add[c];
    }
    if (p.bad_keys) {
        const float poison = *p.bad_queries.at<float>(batch, head, i);
        const float* add = p.bad_keys.at<float>(batch, head / p.groups()) + begin;
        for (int64_t c = at.first; c < at.last; c++) s[c] += add[c] + poison;
    }
    if (kind >= 0 || (kind == BY_SPANS && p.gaps)) return keep_bits(keys_seen(p, kind, batch, head, i, begin, start, stop), at, s);
    if (start > begin + at.left || stop < begin + at.right) {
        const int32_t from = (int32_t)max(start - begin, -1), to = (int32_t)min(stop - begin, PANEL);
#pragma omp simd
        for (int32_t c = (int32_t)at.left; c < (int32_t)at.right; c++) s[c] = c >= from && c < to ? s[c] : -INFINITY;
    }
}

// softmax's input from the scores of one query, s[left ... right), in place: softcap, bias, and -inf where a pair is
// not allowed. `kind`: of the block. `capped` receives the softcap's results, for its derivative in the backward pass; it may be missing.
INLINE void finish(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t begin, const Columns& at,
                   int64_t start, int64_t stop, int32_t kind, float* s, float* capped = nullptr) {
    if (kind == ALL) start = 0, stop = p.keys;
    if (kind == NONE) start = stop = 0;
    const bool whole = kind < 0 && (kind != BY_SPANS || !p.gaps) && start <= begin + at.left && stop >= begin + at.right;
    if (!whole || !p.plain()) epilogue(p, batch, head, i, begin, at, start, stop, kind, s, capped);
}

// Which weights dropout keeps: the hash that src/clearhead/base/dropout.py writes down.
struct Dropout {
    uint32_t columns[PANEL];
    uint32_t sequence = 0;
    int32_t threshold = 0;
    float kept = 1.0f;

    static INLINE uint32_t mix(uint32_t x) {
        x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
        return x;
    }

    void begin(const Problem& p, int64_t batch, int64_t head) {
        sequence = mix(mix(mix(mix((uint32_t)p.seed) + (uint32_t)(p.seed >> 32)) + (uint32_t)batch) + (uint32_t)head);
        threshold = (int32_t)(int64_t)(__builtin_nearbyint(p.dropout_p * 4294967296.0) - 2147483648.0);
        kept = (float)(1.0 / (1.0 - p.dropout_p));
    }

    void panel(int64_t begin) {
        for (int64_t c = 0; c < PANEL; c++) columns[c] = mix((uint32_t)(begin + c) + 0x9e3779b9u);
    }

    // 0, or 1 / (1 - p), for LANES pairs of query i from column c on.
    INLINE V factors(const Problem& p, int64_t i, int64_t c) const {
        U x;
        memcpy(&x, columns + c, sizeof x);
        x += mix(sequence + (uint32_t)(i + p.first_query));
        x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
        return (I)x >= threshold ? splat(kept) : V{};
    }

    void apply(const Problem& p, int64_t i, const Columns& at, float* weights) const {
        for (int64_t c = at.left; c < at.right; c += LANES) store(weights + c, load(weights + c) * factors(p, i, c));
    }
};

}  // namespace clearhead::CLEARHEAD_ISA
