// What a look at the weights finds, in the same pass as the output or without it (docs/maths/inspection.md).
//
// A tile of queries keeps its weights over all keys, in units of e^m as m was at each panel; when the sum of a row is known,
// c = e^(m then - m) / sum turns them into weights, and c^T * tile is what each key receives.
#pragma once

#include "forward.h"

namespace clearhead::CLEARHEAD_ISA {

// The k largest scores of a row, in order; equal ones in the order of the keys, which come in that order.
struct Best {
    float* scores;
    int64_t* keys;
    int64_t k;

    INLINE void begin() const {
        for (int64_t t = 0; t < k; t++) scores[t] = -INFINITY, keys[t] = -1;
    }
    INLINE void take(float score, int64_t key) const {
        if (!(score > scores[k - 1])) return;
        int64_t t = k - 1;
        for (; t > 0 && scores[t - 1] < score; t--) scores[t] = scores[t - 1], keys[t] = keys[t - 1];
        scores[t] = score, keys[t] = key;
    }
    // Fewer than k keys were seen: the others are of weight 0, from key `from` on, each another one.
    void fill(int64_t from, int64_t all) const {
        for (int64_t t = 0; t < k; t++) {
            for (; keys[t] < 0; from++) {
                bool taken = false;
                for (int64_t u = 0; u < k; u++) taken = taken || keys[u] == from % all;
                if (!taken) keys[t] = from % all;
            }
        }
    }
};

// One tile of queries as it is looked at; the look of Forward::pass.
template <class Score>
struct Summarise {
    float *all, *before, *shares, *sums, *tops, *best;  // `all`: the tiles of every panel; `before`: m at each of them
    int64_t* keys;
    V entropy[ROWS];
    const Summary* summary;
    int64_t first_panel, seen_panels;

    static bool keeps(const Summary& s) { return s.received || s.mean || s.peak; }

    void take(const Problem& p, const Summary& s, Memory& memory) {
        summary = &s;
        all = memory.take(keeps(s) ? panels(p) * ROWS * PANEL : 0);
        before = memory.take(keeps(s) ? panels(p) * ROWS : 0);
        shares = memory.take(ROWS), sums = memory.take(PANEL), tops = memory.take(PANEL);
        best = memory.take(ROWS * s.k);
        keys = reinterpret_cast<int64_t*>(memory.take(2 * ROWS * s.k));
    }

    Best best_of(int64_t r) const { return Best{best + r * summary->k, keys + r * summary->k, summary->k}; }

    void begin(int64_t rows) {
        first_panel = -1, seen_panels = 0;
        for (int64_t r = 0; r < rows; r++) {
            entropy[r] = V{};
            best_of(r).begin();
        }
    }

    float* tile(int64_t panel, float* own) {
        if (first_panel < 0) first_panel = panel;
        seen_panels = panel - first_panel + 1;
        return keeps(*summary) ? all + (panel - first_panel) * ROWS * PANEL : own;
    }

    // sum p y, y = s - m, when m becomes larger: `apart` is added to each y, and the sum of p was `weights`.
    void rescale(int64_t r, float factor, float apart, V weights) {
        if (factor == 0.0f) return;  // nothing had been seen
        entropy[r] = factor * (entropy[r] + apart * weights);
    }

    INLINE void scores(int64_t r, const float* s, int64_t left, int64_t right, int64_t begin) {
        if (!summary->k) return;
        const Best found = best_of(r);
        if (!any_above(tops_of(s, left, right), found.scores[found.k - 1])) return;
        for (int64_t c = left; c < right; c += LANES) {
            const V v = load(s + c);
            if (any_above(v, found.scores[found.k - 1]))
                for (int x = 0; x < LANES; x++) found.take(v[x], begin + c + x);
        }
    }

    INLINE void weights(int64_t r, V weight, V above) {
        entropy[r] += weight * larger(splat(-200.0f), above);  // not 0 * -inf
    }

    INLINE void panel(int64_t panel, int64_t rows, const Softmax& softmax) {
        if (!keeps(*summary)) return;
        for (int64_t r = 0; r < rows; r++) before[(panel - first_panel) * ROWS + r] = softmax.reference(r);
    }

    // The results of row r.
    void row(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t r, const Softmax& softmax, float inverse) {
        const Summary& s = *summary;
        const float total = softmax.total(r, sink_of(p, head)), keys_sum = sum(softmax.sums[r]);
        const float m = softmax.reference(r), rest = total == 0.0f ? 0.0f : __builtin_logf(total);
        const bool blind = keys_sum == 0.0f;
        if (s.largest) *s.largest.at<float>(batch, head, i) = blind ? INFINITY : m;
        if (s.rest) *s.rest.at<float>(batch, head, i) = blind ? 0.0f : rest;
        if (s.entropy) {  // -sum w log w, with log w = y - rest
            const float found = (rest * keys_sum - sum(entropy[r])) * inverse;
            *s.entropy.at<float>(batch, head, i) = blind || found < 0.0f ? 0.0f : found;
        }
        if (s.k) {
            const Best found = best_of(r);
            found.fill(p.start ? most(*p.start.at<int64_t>(batch, head, i), 0) : 0, p.keys);
            float* values = s.values.at<float>(batch, head, i);
            for (int64_t t = 0; t < s.k; t++) values[t] = exp_of(found.scores[t] - m) * inverse;
            memcpy(s.indices.at<int64_t>(batch, head, i), found.keys, sizeof(int64_t) * (size_t)s.k);
        }
    }

    // What the keys of a panel receive from the rows [from, to), all of one row of cells: `inverse` is 1 / sum of each.
    void columns(const Problem& p, int64_t batch, int64_t head, int64_t cell_row, int64_t panel, int64_t from, int64_t to,
                 const Columns& at, const Softmax& softmax, const float* inverse, float* received) {
        const Summary& s = *summary;
        const float *tile = all + (panel - first_panel) * ROWS * PANEL, *then = before + (panel - first_panel) * ROWS;
        const int64_t begin = panel * PANEL, cell = s.cell_columns;
        for (int64_t r = from; r < to; r++) shares[r] = exp_of(then[r] - softmax.reference(r)) * inverse[r];
        if (s.received || s.mean) {
            product<false>(1, at.right - at.left, to - from, shares + from, 1, 1, tile + from * PANEL + at.left, PANEL,
                           sums + at.left, PANEL);
            if (s.received)
                for (int64_t c = at.first; c < at.last; c++) received[begin + c] += sums[c];
            if (s.mean) {
                float* to_cells = s.mean.at<float>(batch, head, cell_row);
                for (int64_t c = at.first; c < at.last;) {
                    const int64_t which = (begin + c) / cell, end = least(at.last, (which + 1) * cell - begin);
                    float part = 0.0f;
                    for (; c < end; c++) part += sums[c];
                    to_cells[which] += part;
                }
            }
        }
        if (s.peak) {
            for (int64_t c = at.left; c < at.right; c += LANES) {
                V high{};
                for (int64_t r = from; r < to; r++) high = larger(load(tile + r * PANEL + c) * shares[r], high);
                store(tops + c, high);
            }
            float* to_cells = s.peak.at<float>(batch, head, cell_row);
            for (int64_t c = at.first; c < at.last;) {
                const int64_t which = (begin + c) / cell, end = least(at.last, (which + 1) * cell - begin);
                float part = to_cells[which];
                for (; c < end; c++) part = tops[c] > part ? tops[c] : part;
                to_cells[which] = part;
            }
        }
    }
};

// The work: each head's queries in `parts`, cut where rows of cells end, each with a sum of its own of what the keys receive.
struct LookShares {
    int64_t heads, parts, queries;

    LookShares(const Problem& p, const Summary& s) {
        heads = p.batch * p.heads;
        parts = heads >= 3 * p.threads || heads % p.threads == 0 ? 1 : (2 * p.threads + heads - 1) / most(heads, 1);
        queries = round_up((p.queries + parts - 1) / parts, s.cell_rows);
        parts = most(1, queries ? (p.queries + queries - 1) / queries : 1);
    }
};

template <class Score>
int64_t summary_floats(const Problem& p, const Summary& s) {
    Memory shared, own;
    Packed<Score>().take(p, shared);
    const LookShares by(p, s);
    if (s.received) shared.take(by.parts * by.heads * p.keys);
    Forward<Score>().take(p, own);
    Summarise<Score>().take(p, s, own);
    return shared.used + p.threads * own.used;
}

template <class Score>
void summarise(const Problem& p, const Summary& s, float* workspace) {
    Memory shared{workspace}, counted;
    Packed<Score> packed;
    packed.take(p, shared);
    const LookShares by(p, s);
    float* received = s.received ? shared.take(by.parts * by.heads * p.keys) : nullptr;
    Forward<Score>().take(p, counted);
    Summarise<Score>().take(p, s, counted);
#pragma omp parallel num_threads(p.threads)
    {
        Memory own{workspace + shared.used + thread() * counted.used};
        Forward<Score> pass;
        Summarise<Score> look;
        pass.take(p, own), look.take(p, s, own);
        Softmax softmax;
        float finite = 0.0f, inverse[ROWS];
        pack_all(p, packed, finite);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < by.heads * by.parts; unit++) {
            const int64_t of = unit / by.parts, part = unit % by.parts, batch = of / p.heads, head = of % p.heads;
            float* to_keys = received ? received + (part * by.heads + of) * p.keys : nullptr;
            if (to_keys) memset(to_keys, 0, sizeof(float) * (size_t)p.keys);
            const int64_t end = least(p.queries, (part + 1) * by.queries);
            for (int64_t first = part * by.queries; first < end; first += ROWS) {
                const int64_t rows = least(ROWS, end - first);
                look.begin(rows);
                pass.pass(p, packed, batch, head, first, rows, softmax, look, finite);
                for (int64_t r = 0; r < rows; r++) {
                    inverse[r] = Softmax::inverse(softmax.total(r, sink_of(p, head)));
                    look.row(p, batch, head, first + r, r, softmax, inverse[r]);
                    if (p.out) pass.write(p, batch, head, first + r, r, inverse[r], finite);
                }
                if (!look.keeps(s) || look.first_panel < 0) continue;
                const Seen seen(p, batch, head, first, rows);
                for (int64_t from = 0; from < rows;) {
                    const int64_t cell_row = (first + from) / s.cell_rows;
                    const int64_t to = least(rows, (cell_row + 1) * s.cell_rows - first);
                    for (int64_t i = look.first_panel; i < look.first_panel + look.seen_panels; i++)
                        look.columns(p, batch, head, cell_row, i, from, to, Columns(seen.low, seen.high, i), softmax,
                                     inverse, to_keys);
                    from = to;
                }
            }
        }
        if (received) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < by.heads * p.keys; i++) {
                float all = 0.0f;
                for (int64_t part = 0; part < by.parts; part++) all += received[part * by.heads * p.keys + i];
                s.received.at<float>(i / p.keys / p.heads, i / p.keys % p.heads)[i % p.keys] = all;
            }
        }
    }
}

}  // namespace clearhead::CLEARHEAD_ISA
