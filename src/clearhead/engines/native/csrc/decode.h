// Few queries and many keys, as where a model generates one token at a time: every key is read once, where it lies, and
// no panels are packed. All query heads that share a key head are computed together; long caches are split among the
// threads, and the parts are joined by their sums.
#pragma once

#include "forward.h"

namespace clearhead::CLEARHEAD_ISA {

// How the keys are split: `splits` runs of `length` keys, a whole number of panels.
struct Splits {
    int64_t heads, splits, length;

    explicit Splits(const Problem& p) {
        heads = p.batch * p.key_heads;
        splits = heads >= 3 * p.threads || heads % p.threads == 0 ? 1 : (2 * p.threads + heads - 1) / max(heads, 1);
        length = round_up((p.keys + splits - 1) / splits, PANEL);
        splits = max(1, length ? (p.keys + length - 1) / length : 1);
    }
};

constexpr int64_t AHEAD = 2048;  // bytes from a key to the one that is prefetched meanwhile

template <class Score>
struct Decode {
    float *queries, *key, *values, *tile;

    void take(const Problem& p, Memory& memory) {
        queries = memory.take(Score::query_floats(p));
        key = memory.take(Score::wide(p));
        values = memory.take(p.value_width == value_wide(p) ? 0 : PANEL * value_wide(p));
        tile = memory.take(ROWS * PANEL);
    }

    static int64_t rows(const Problem& p) { return p.groups() * p.queries; }
    static int64_t head_of(const Problem& p, int64_t key_head, int64_t r) { return key_head * p.groups() + r / p.queries; }

    // Whether some query sees a key of a panel, by the map of blocks.
    __attribute__((noinline)) static bool sees(const Problem& p, int64_t batch, int64_t key_head, int64_t panel) {
        for (int64_t head = key_head * p.groups(); head < (key_head + 1) * p.groups(); head++)
            if (kind_of(p, batch, head, 0, panel) != NONE) return true;
        return false;
    }

    // A split of one key head's keys: for each row its sums over them in `out`, then m and the sum of the weights.
    void run(const Problem& p, int64_t batch, int64_t key_head, int64_t from, int64_t to, float* out, float& finite) {
        const int64_t rows = Decode::rows(p), wide = value_wide(p);
        RowSpans spans(p);
        Softmax softmax;
        V odd{};
        for (int64_t r = 0; r < rows; r++) {
            spans.add(p, batch, head_of(p, key_head, r), r % p.queries, r);
            softmax.begin(r);
        }
        for (int64_t head = key_head * p.groups(), r = 0; r < rows; head++, r += p.queries)
            pack(p, batch, head, r, finite);
        memset(out, 0, sizeof(float) * (size_t)(rows * (wide + LANES)));
        const int64_t low = max(spans.low, from), high = min(spans.high, to);
        for (int64_t panel = low / PANEL; panel * PANEL < high; panel++) {
            if (p.tiles && !sees(p, batch, key_head, panel)) continue;
            const int64_t begin = panel * PANEL;
            const Columns at(low, high, panel);
            const Rows keys(p.key, batch, key_head, begin), of_panel(p.value, batch, key_head, begin);
            keys.read([&](const auto* first) { scores(p, first, keys.step, of_panel, at, odd); });
            for (int64_t r = 0; r < rows; r++) {
                float *s = tile + r * PANEL, *o = out + r * (wide + LANES), apart;
                for (int64_t c = at.left; c < at.first; c++) s[c] = 0.0f;
                for (int64_t c = at.last; c < at.right; c++) s[c] = 0.0f;
                const int64_t head = head_of(p, key_head, r);
                finish(p, batch, head, r % p.queries, begin, at, max(spans.start[r], low), min(spans.stop[r], high),
                       kind_of(p, batch, head, 0, panel), s);
                const float factor = softmax.update_max(r, tops_of(s, at.left, at.right), apart),
                            m = softmax.reference(r);
                if (factor != 1.0f)
                    for (int64_t e = 0; e < wide; e += LANES) store(o + e, load(o + e) * factor);
                for (int64_t c = at.left; c < at.right; c += LANES) {
                    const V weight = exp(load(s + c) - m);
                    softmax.sums[r] += weight;
                    store(s + c, weight);
                }
                if (p.dropout_p > 0) {
                    Dropout dropout;
                    dropout.begin(p, batch, head_of(p, key_head, r)), dropout.panel(begin);
                    dropout.apply(p, r % p.queries, at, s);
                }
            }
            const int64_t count = at.last - at.first;
            if (p.value_width != wide) {
                copy_rows(of_panel.from(at.first), count, p.value_width, values, wide);
                product_by_rows(rows, wide, count, tile + at.first, PANEL, values, wide, out, wide + LANES);
            } else {
                of_panel.from(at.first).read([&](const auto* value) {
                    product_by_rows(rows, wide, count, tile + at.first, PANEL, value, of_panel.step, out, wide + LANES);
                });
            }
        }
        finite += sum(0.0f * odd);
        for (int64_t r = 0; r < rows; r++) {
            float* o = out + r * (wide + LANES) + wide;
            o[0] = softmax.largest[r], o[1] = sum(softmax.sums[r]);
        }
    }

    // The scores of all rows with the keys `at` of a panel, `step` numbers apart from `first` on.
    template <class T>
    void scores(const Problem& p, const T* first, int64_t step, const Rows& values, const Columns& at, V& odd) {
        const int64_t width = Score::wide(p), many = rows(p), ahead = max(1, AHEAD / (int64_t)sizeof(T) / max(width, 1)) * step;
        const char* value = static_cast<const char*>(values.from(at.first).data);
        const int64_t value_step = static_cast<const char*>(values.from(1).data) - static_cast<const char*>(values.data);
        for (int64_t c = at.first; c < at.last; c++, value += value_step) {
            const T* k = first + c * step;
            const Prefetch prefetch{reinterpret_cast<const char*>(k + ahead), value};
            if (p.width == width) {
                Score::key_scores(p, queries, many, k, prefetch, tile + c, odd);
            } else {
                copy_rows(k, 0, 1, p.width, key, width);
                Score::key_scores(p, queries, many, (const float*)key, prefetch, tile + c, odd);
            }
        }
    }

    // The queries of one head, at row r of the tile.
    void pack(const Problem& p, int64_t batch, int64_t head, int64_t r, float& finite) {
        Score::pack_few(p, Rows(p.query, batch, head), p.queries, queries, finite, r);
    }

    // Joins the splits of one row.
    void join(const Problem& p, const Splits& by, const float* parts, int64_t batch, int64_t key_head, int64_t r,
              float& finite) {
        const int64_t wide = value_wide(p), size = rows(p) * (wide + LANES), head = head_of(p, key_head, r);
        const float sink = sink_of(p, head), *first = parts + r * (wide + LANES);
        float largest = sink;
        for (int64_t s = 0; s < by.splits; s++)
            if (first[s * size + wide] > largest) largest = first[s * size + wide];
        const float m = largest == -INFINITY ? 0.0f : largest;
        float total = sink == -INFINITY ? 0.0f : exp_of(sink - m), *out = p.out.at<float>(batch, head, r % p.queries);
        for (int64_t s = 0; s < by.splits; s++) total += exp_of(first[s * size + wide] - m) * first[s * size + wide + 1];
        const float inverse = Softmax::inverse(total);
        for (int64_t e = 0; e < p.value_width; e++) out[e] = 0.0f;
        for (int64_t s = 0; s < by.splits; s++) {
            const float factor = exp_of(first[s * size + wide] - m) * inverse;
            for (int64_t e = 0; e < p.value_width; e++) out[e] += factor * first[s * size + e];
        }
        check_finite(out, p.value_width, finite);
        write_row(p, batch, head, r % p.queries, m, total);
    }
};

template <class Score>
int64_t decode_floats(const Problem& p) {
    const Splits by(p);
    Memory shared, own;
    shared.take(by.heads * by.splits * Decode<Score>::rows(p) * (value_wide(p) + LANES));
    Decode<Score>().take(p, own);
    return shared.used + p.threads * own.used;
}

template <class Score>
bool decode(const Problem& p, float* workspace) {
    const Splits by(p);
    Memory shared{workspace}, counted;
    const int64_t rows = Decode<Score>::rows(p), size = rows * (value_wide(p) + LANES);
    float *parts = shared.take(by.heads * by.splits * size), finite = 0.0f;
    Decode<Score>().take(p, counted);
#pragma omp parallel num_threads(p.threads) reduction(+ : finite)
    {
        Memory own{workspace + shared.used + thread() * counted.used};
        Decode<Score> mine;
        mine.take(p, own);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < by.heads * by.splits; i++) {
            const int64_t of = i / by.splits, from = i % by.splits * by.length;
            mine.run(p, of / p.key_heads, of % p.key_heads, from, min(from + by.length, p.keys), parts + i * size, finite);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < by.heads * rows; i++) {
            const int64_t of = i / rows;
            mine.join(p, by, parts + of * by.splits * size, of / p.key_heads, of % p.key_heads, i % rows, finite);
        }
    }
    return finite == 0.0f;
}

}  // namespace clearhead::CLEARHEAD_ISA
