// The output, a tile of queries at a time over the panels of keys that it sees (docs/maths/softmax.md).
#pragma once

#include "mul.h"
#include "softmax.h"

namespace clearhead::CLEARHEAD_ISA {

INLINE int64_t panels(const Problem& p) { return (p.keys + PANEL - 1) / PANEL; }
INLINE int64_t query_tiles(const Problem& p) { return (p.queries + ROWS - 1) / ROWS; }
INLINE int64_t keys_of(const Problem& p, int64_t panel) { return min(p.keys - panel * PANEL, PANEL); }

// Memory in pieces of whole cache lines: first counted, then handed out.
struct Memory {
    float* at = nullptr;
    int64_t used = 0;

    float* take(int64_t floats) {
        float* piece = at ? at + used : nullptr;
        used += round_up(floats, 16);
        return piece;
    }
};

// Keys, and values where the score's products ask for it, packed once for all tiles.
template <class Score>
struct Packed {
    float *panel = nullptr, *values = nullptr;
    int64_t panel_floats = 0, value_floats = 0;

    void take(const Problem& p, Memory& memory) {
        panel_floats = round_up(Score::panel_floats(p), 16);
        panel = memory.take(p.batch * p.key_heads * panels(p) * panel_floats);
        value_floats = Score::value_floats(p);
        if (value_floats) values = memory.take(p.batch * p.key_heads * panels(p) * value_floats);
    }

    float* panel_at(const Problem& p, int64_t batch, int64_t key_head, int64_t i) const {
        return panel + ((batch * p.key_heads + key_head) * panels(p) + i) * panel_floats;
    }
    float* values_at(const Problem& p, int64_t batch, int64_t key_head, int64_t i) const {
        return values + ((batch * p.key_heads + key_head) * panels(p) + i) * value_floats;
    }

    // One panel; called by all threads, each with panels of its own.
    void pack(const Problem& p, int64_t batch, int64_t key_head, int64_t i, float& finite) {
        const int64_t first = i * PANEL, count = keys_of(p, i);
        const Rows keys(p.key, batch, key_head, first);
        Score::pack_panel(p, keys, count, panel_at(p, batch, key_head, i));
        keys.read([&](const auto* key) {
            for (int64_t j = 0; j < count; j++) check_finite(key + j * keys.step, p.width, finite);
        });
        if (values) Score::pack_values(p, Rows(p.value, batch, key_head, first), count, values_at(p, batch, key_head, i));
    }
};

// Without reductions nothing is kept but the output. `Summarise` (summarise.h) has the same members.
struct NoReduction {
    float* tile(int64_t, bool, float* own) { return own; }
    void rescale(int64_t, float, float, V) {}
    void scores(const float*, const Part&, int64_t) {}
    void weights(int64_t, int64_t, V, V) {}
    void panel(int64_t, const Softmax&) {}
};

// The statistics of a row that the backward pass reads.
INLINE void write_row(const Problem& p, int64_t batch, int64_t head, int64_t i, float m, float total) {
    if (!p.maximum) return;
    *p.maximum.at<float>(batch, head, i) = m;
    *p.log_sum.at<float>(batch, head, i) = total == 0.0f ? INFINITY : __builtin_logf(total);
}

template <class Score>
struct Forward {
    float *queries, *tile, *out, *values;

    void take(const Problem& p, Memory& memory) {
        queries = memory.take(Score::query_floats(p));
        tile = memory.take(ROWS * PANEL);
        out = memory.take(ROWS * value_wide(p));
        values = memory.take(p.value.element == FLOAT32 || Score::value_floats(p) ? 0 : PANEL * value_wide(p));
    }

    // A panel of values as rows, `step` numbers apart. Where they are of 16 bits and not packed, the keys `at` are copied, so that no
    // copy of all of them is made.
    const float* values_of(const Problem& p, const Packed<Score>& packed, int64_t batch, int64_t key_head, int64_t panel,
                           const Columns& at, int64_t& step) const {
        step = value_wide(p);
        if (packed.values) return packed.values_at(p, batch, key_head, panel);
        const Rows all(p.value, batch, key_head, panel * PANEL);
        if (all.element == FLOAT32) {
            step = all.step;
            return static_cast<const float*>(all.data);
        }
        copy_rows(all.from(at.first), at.last - at.first, p.value_width, values + at.first * step, step);
        return values;
    }

    // Rescales the sums of row r to the new m. `before`: the sum of its weights until now.
    template <class Reduction>
    static INLINE void rescale(int64_t r, float factor, float apart, V before, float* out, int64_t wide, Reduction& reduction) {
        if (factor == 1.0f) return;
        for (int64_t e = 0; e < wide; e += LANES) store(out + e, load(out + e) * factor);
        reduction.rescale(r, factor, apart, before);
    }

    // From the scores s[left ... right) of row r to its weights, in place; `begin`: the key of s[0]; `out`: its sum of values
    // until now.
    template <class Reduction>
    static INLINE void weigh(int64_t r, int64_t begin, float* s, int64_t left, int64_t right, float* out, int64_t wide,
                             Softmax& softmax, Reduction& reduction) {
        float apart;
        const V before = softmax.sums[r];
        const float factor = softmax.update_max(r, tops_of(s, left, right), apart);
        rescale(r, factor, apart, before, out, wide, reduction);
        const float m = softmax.reference(r);
        V sums = softmax.sums[r];
        for (int64_t c = left; c < right; c += LANES) {
            const V above = load(s + c) - m, weight = exp(above);
            sums += weight;
            reduction.weights(r, begin + c, weight, above);
            store(s + c, weight);
        }
        softmax.sums[r] = sums;
    }

    // A tile of queries from `first` on, past all that they see; `softmax` and `out` are the result, not yet divided.
    template <class Reduction>
    void pass(const Problem& p, const Packed<Score>& packed, int64_t batch, int64_t head, int64_t first, int64_t rows,
              Softmax& softmax, Reduction& reduction, float& finite) {
        const int64_t key_head = head / p.groups(), wide = value_wide(p);
        const RowSpans spans(p, batch, head, first, rows);
        for (int64_t r = 0; r < rows; r++) softmax.begin(r);
        Dropout dropout;
        if (p.dropout_p > 0) dropout.begin(p, batch, head);
        Score::pack_queries(p, Rows(p.query, batch, head, first), rows, queries, finite);
        memset(out, 0, sizeof(float) * (size_t)(rows * wide));
        // a summary's tiles may begin anywhere, so that they lie in two of the map's
        const int64_t tile_of_first = first / ROWS, tile_of_last = (first + rows - 1) / ROWS, cut = ROWS - first % ROWS;
        for (int64_t panel = spans.low / PANEL;; panel++) {
            const Block one = next_block(p, batch, head, tile_of_first, panel);
            const Block two = tile_of_last == tile_of_first ? one : next_block(p, batch, head, tile_of_last, panel);
            panel = min(one.panel, two.panel);
            const int64_t begin = panel * PANEL;
            if (begin >= spans.high) break;
            const int32_t kind = one.panel == panel ? one.kind : NONE, next = two.panel == panel ? two.kind : NONE;
            const Parts parts(p, spans, batch, head, first, rows, panel, kind, next, cut);
            if (!parts.count) continue;
            float* scores = reduction.tile(panel, parts.whole, tile);
            if (p.dropout_p > 0) dropout.panel(begin);
            int64_t step = 0;
            const Columns seen(spans.low, spans.high, panel);
            const float* of_panel = wide ? values_of(p, packed, batch, key_head, panel, seen, step) : nullptr;
            for (const Part& at : parts) {
                Score::scores(p, queries, packed.panel_at(p, batch, key_head, panel),
                              Rows(p.key, batch, key_head, begin), at, scores);
                for (int64_t r = at.top; r < at.bottom; r++)
                    finish(p, batch, head, first + r, begin, at, spans.start[r], spans.stop[r], r < cut ? kind : next,
                           scores + r * PANEL);
                reduction.scores(scores, at, begin);
                for (int64_t r = at.top; r < at.bottom; r++) {
                    float* s = scores + r * PANEL;
                    if (at.left == 0 && at.right == PANEL)
                        weigh(r, begin, s, 0, PANEL, out + r * wide, wide, softmax, reduction);
                    else
                        weigh(r, begin, s, at.left, at.right, out + r * wide, wide, softmax, reduction);
                    if (p.dropout_p > 0) dropout.apply(p, first + r, at, s);
                }
                if (wide) Score::add_values(p, queries, scores, of_panel, step, at, out);
            }
            reduction.panel(rows, softmax);
        }
        const float sink = sink_of(p, head);
        for (int64_t r = 0; r < rows; r++) {
            float apart;
            const V before = softmax.sums[r];
            const float factor = softmax.end(r, sink, apart);
            rescale(r, factor, apart, before, out + r * wide, wide, reduction);
        }
    }

    // The output's rows, divided by the sum of the weights.
    void write(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t r, float inverse, float& finite) {
        const int64_t wide = value_wide(p);
        float* o = out + r * wide;
        for (int64_t e = 0; e < wide; e += LANES) store(o + e, load(o + e) * inverse);
        memcpy(p.out.at<float>(batch, head, i), o, sizeof(float) * (size_t)p.value_width);
        check_finite(o, p.value_width, finite);
    }

    // The output's row and the two numbers of its softmax, merged with those over other keys.
    void merge(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t r, float m, float total) {
        if (total == 0.0f) return;  // none of these keys is seen
        float *maximum = p.maximum.at<float>(batch, head, i), *log_sum = p.log_sum.at<float>(batch, head, i);
        const bool first = *log_sum == INFINITY;  // nothing has been seen before
        const float largest = first || m > *maximum ? m : *maximum;
        const float mine = exp_of(m - largest), before = first ? 0.0f : exp_of(*maximum - largest + *log_sum);
        const float all = mine * total + before, keep = before / all, share = mine / all, *o = out + r * value_wide(p);
        float* to = p.out.at<float>(batch, head, i);
        for (int64_t e = 0; e < p.value_width; e++) to[e] = keep * to[e] + share * o[e];
        *maximum = largest, *log_sum = __builtin_logf(all);
    }

    void run(const Problem& p, const Packed<Score>& packed, int64_t batch, int64_t head, int64_t first, float& finite) {
        const int64_t rows = min(ROWS, p.queries - first);
        Softmax softmax;
        NoReduction reduction;
        pass(p, packed, batch, head, first, rows, softmax, reduction, finite);
        for (int64_t r = 0; r < rows; r++) {
            const float total = softmax.total(r, sink_of(p, head));
            if (p.merges) {
                merge(p, batch, head, first + r, r, softmax.reference(r), total);
                continue;
            }
            write(p, batch, head, first + r, r, Softmax::inverse(total), finite);
            write_row(p, batch, head, first + r, softmax.reference(r), total);
        }
    }
};

// Packs all panels; inside a parallel region, whose threads share them.
template <class Score>
INLINE void pack_all(const Problem& p, Packed<Score>& packed, float& finite) {
    const int64_t count = panels(p);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < p.batch * p.key_heads * count; i++) {
        const int64_t of = i / count;
        packed.pack(p, of / p.key_heads, of % p.key_heads, i % count, finite);
    }
}

// The memory of a pass over all tiles of queries with packed keys: `Pass` is Forward or Scores.
template <class Score, class Pass>
int64_t tiles_floats(const Problem& p) {
    Memory shared, own;
    Packed<Score>().take(p, shared);
    Pass().take(p, own);
    return shared.used + p.threads * own.used;
}

// Returns whether all inputs read, and the output, are finite.
template <class Score, class Pass>
bool each_tile(const Problem& p, float* workspace) {
    Memory shared{workspace}, counted;
    Packed<Score> packed;
    packed.take(p, shared);
    Pass().take(p, counted);
    const int64_t tiles = query_tiles(p);
    float finite = 0.0f;
#pragma omp parallel num_threads(p.threads) reduction(+ : finite)
    {
        Memory own{workspace + shared.used + thread() * counted.used};
        Pass mine;
        mine.take(p, own);
        pack_all(p, packed, finite);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < p.batch * p.heads * tiles; i++) {
            const int64_t of = i / tiles;
            mine.run(p, packed, of / p.heads, of % p.heads, i % tiles * ROWS, finite);
        }
    }
    return finite == 0.0f;
}

template <class Score>
int64_t forward_floats(const Problem& p) { return tiles_floats<Score, Forward<Score>>(p); }
template <class Score>
bool forward(const Problem& p, float* workspace) { return each_tile<Score, Forward<Score>>(p, workspace); }

}  // namespace clearhead::CLEARHEAD_ISA
