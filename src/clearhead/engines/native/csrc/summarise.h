// Statistics of the weights, in the same pass as the output or without it (docs/maths/inspection.md).
//
// A tile of queries keeps e^(score - m) for all keys, with the m that each panel had. When the sum of a row is known,
// c = e^(m of the panel - m) / sum turns these numbers into weights, and c^T * tile is the weight that each key receives.
#pragma once

#include "forward.h"
#include "sent.h"

namespace clearhead::CLEARHEAD_ISA {

// The k largest scores of a row, in order; equal scores stand in the order of their keys, which are seen in this order.
// They are kept in whole vectors, the last of which has room for a few more.
struct Best {
    float* scores;
    int32_t* keys;
    int64_t k;

    static int64_t room(int64_t k) { return round_up(k, LANES); }

    INLINE void begin() const {
        for (int64_t t = 0; t < room(k); t++) scores[t] = -INFINITY, keys[t] = -1;
    }
    INLINE float smallest() const { return scores[k - 1]; }

    // Inserts a score into one vector of the list: all lower ones move one place on, and `left` moves in before them.
    static INLINE void take(V& now, I& now_key, float score, int32_t key, float left, int32_t left_key) {
        const V before = pushed(now, left);
        I before_key = (I)pushed((V)now_key, 0.0f);
        before_key[0] = left_key;
        const I lower = score > now, moved = score > before;
        now = max(min(before, splat(score)), now);
        now_key = lower ? (moved ? before_key : key - I{}) : now_key;
    }
    // Inserts the scores of a panel whose bits are set. A list of one vector stays in registers meanwhile.
    INLINE void take(const float* s, uint64_t bits, int32_t begin) const {
        if (k <= LANES) {
            V now = load(scores);
            I now_key = load(keys);
            for (; bits; bits &= bits - 1) {
                const int32_t c = __builtin_ctzll(bits);
                take(now, now_key, s[c], begin + c, INFINITY, -1);
            }
            store(scores, now), store(keys, now_key);
            return;
        }
        for (; bits; bits &= bits - 1) {
            const int32_t c = __builtin_ctzll(bits);
            float left = INFINITY;
            int32_t left_key = -1;
            for (int64_t t = 0; t < k; t += LANES) {
                V now = load(scores + t);
                I now_key = load(keys + t);
                const float last = scores[t + LANES - 1];
                const int32_t last_key = keys[t + LANES - 1];
                take(now, now_key, s[c], begin + c, left, left_key);
                store(scores + t, now), store(keys + t, now_key);
                left = last, left_key = last_key;
            }
        }
    }
    // The k largest of a panel's scores, s[left … right), into an empty list: each time the largest score that is left, and
    // of equal scores the first. Otherwise most insertions would happen here, while the list is not full.
    INLINE void take_first(const float* s, int64_t left, int64_t right, int32_t begin) const {
        constexpr int VECTORS = PANEL / LANES;
        V rest[VECTORS];
        I lane;
        for (int x = 0; x < LANES; x++) lane[x] = x;
        for (int i = 0; i < VECTORS; i++) {
            const int64_t c = i * LANES;
            rest[i] = c >= left && c < right ? load(s + c) : splat(-INFINITY);
        }
        for (int64_t t = 0; t < k; t++) {
            V tops = rest[0];
            for (int i = 1; i < VECTORS; i++) tops = max(rest[i], tops);
            const float most = top(tops);
            uint64_t bits = 0;
            for (int i = 0; i < VECTORS; i++) bits |= (uint64_t)equal(rest[i], most) << (i * LANES);
            if (!(most > -INFINITY) || !bits) return;  // NaN is in no list
            const int32_t place = __builtin_ctzll(bits);
            scores[t] = most, keys[t] = begin + place;
            for (int i = 0; i < VECTORS; i++) rest[i] = lane == place - i * LANES ? splat(-INFINITY) : rest[i];
        }
    }
    // Where fewer than k keys were seen: fills the other places with distinct keys of weight 0, from key `from` on.
    void fill(int64_t from, int64_t all) const {
        for (int64_t t = 0; t < k; t++) {
            for (; keys[t] < 0; from++) {
                bool taken = false;
                for (int64_t u = 0; u < k; u++) taken = taken || keys[u] == from % all;
                if (!taken) keys[t] = (int32_t)(from % all);
            }
        }
    }
};

// The reductions over one tile of queries: the last argument of Forward::pass.
template <class Score>
struct Summarise {
    float *all, *before, *sums, *tops, *scores_found;  // `all`: the tiles of the panels seen; `before`: m at each of them
    int64_t* seen_panels;
    int32_t* keys_found;
    V entropy[ROWS], distance[ROWS];
    float position[ROWS];
    const Summary* summary;
    int64_t seen, low, high;
    bool odd;  // some of `tops` are NaN

    static bool keeps(const Summary& s) { return s.received || s.mean || s.peak; }

    void take(const Problem& p, const Summary& s, Memory& memory) {
        summary = &s;
        all = memory.take(keeps(s) ? panels(p) * ROWS * PANEL : 0);
        before = memory.take(keeps(s) ? panels(p) * ROWS : 0);
        sums = memory.take(keeps(s) ? panels(p) * PANEL : 0), tops = memory.take(keeps(s) ? panels(p) * PANEL : 0);
        seen_panels = reinterpret_cast<int64_t*>(memory.take(keeps(s) ? 2 * panels(p) : 0));
        scores_found = memory.take(ROWS * Best::room(s.kept()));
        keys_found = reinterpret_cast<int32_t*>(memory.take(ROWS * Best::room(s.kept())));
    }

    INLINE Best best_of(int64_t r) const {
        const int64_t at = r * Best::room(summary->kept());
        return Best{scores_found + at, keys_found + at, summary->kept()};
    }

    void begin(int64_t batch, int64_t head, int64_t first, int64_t rows) {
        seen = 0;
        for (int64_t r = 0; r < rows; r++) {
            entropy[r] = distance[r] = V{};
            if (summary->distance) position[r] = (float)*summary->position.at<int64_t>(batch, head, first + r);
            best_of(r).begin();
        }
    }

    // The place for the scores of a panel. All of them are computed if `whole`; else the others count as weights of 0.
    float* tile(int64_t panel, bool whole, float* own) {
        if (!keeps(*summary)) return own;
        seen_panels[seen++] = panel;
        float* to = all + (seen - 1) * ROWS * PANEL;
        if (!whole) memset(to, 0, sizeof(float) * ROWS * PANEL);
        return to;
    }

    // sum p y, y = s - m, when m becomes larger: `apart` is added to each y, and the sum of p was `weights`.
    void rescale(int64_t r, float factor, float apart, V weights) {
        // a factor of 0: nothing had been seen, or it has underflowed; and `apart` may be -inf
        entropy[r] = factor == 0.0f ? V{} : factor * (entropy[r] + apart * weights);
        distance[r] *= factor;
    }

    // The scores of a panel. Rows and keys with a score to take are found without a branch, which would be mispredicted
    // each time there is one.
    void scores(const float* tile, const Part& at, int64_t begin) {
        if (!summary->kept()) return;
        uint64_t better = 0;
        for (int64_t r = at.top; r < at.bottom; r++)
            better |= (uint64_t)any_above(tops_of(tile + r * PANEL, at.left, at.right), best_of(r).smallest()) << r;
        for (; better; better &= better - 1) {
            const int64_t r = __builtin_ctzll(better);
            const Best found = best_of(r);
            if (found.scores[0] == -INFINITY) {
                found.take_first(tile + r * PANEL, at.left, at.right, (int32_t)begin);
                continue;
            }
            // while the list is not full the limit rises with each vector
            const int64_t step = found.smallest() == -INFINITY ? LANES : PANEL;
            for (int64_t from = at.left; from < at.right; from += step) {
                uint64_t bits = 0;
                for (int64_t c = from; c < min(at.right, from + step); c += LANES)
                    bits |= (uint64_t)above(load(tile + r * PANEL + c), found.smallest()) << c;
                found.take(tile + r * PANEL, bits, (int32_t)begin);
            }
        }
    }

    INLINE void weights(int64_t r, int64_t key, V weight, V above) {
        entropy[r] += weight * max(splat(-200.0f), above);  // not 0 * -inf
        if (summary->distance) {
            const V gap = count_up() + ((float)key - position[r]);
            distance[r] += weight * max(gap, -gap);
        }
    }

    INLINE void panel(int64_t rows, const Softmax& softmax) {
        if (!keeps(*summary)) return;
        for (int64_t r = 0; r < rows; r++) before[(seen - 1) * ROWS + r] = softmax.reference(r);
    }

    // The results of row r.
    void row(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t r, const Softmax& softmax, float inverse) {
        const Summary& s = *summary;
        const float total = softmax.total(r, sink_of(p, head)), keys_sum = sum(softmax.sums[r]);
        const float m = softmax.reference(r), rest = total == 0.0f ? 0.0f : __builtin_logf(total);
        const bool blind = softmax.blind[r];
        if (p.maximum) {
            *p.maximum.at<float>(batch, head, i) = blind ? 0.0f : m == INFINITY ? NAN : m;
            *p.log_sum.at<float>(batch, head, i) = blind ? INFINITY : rest;
        }
        if (s.entropy) {  // -sum w log w, with log w = y - rest
            const float found = (rest * keys_sum - sum(entropy[r])) * inverse;
            *s.entropy.at<float>(batch, head, i) = blind || found < 0.0f ? 0.0f : found;
        }
        if (s.distance) *s.distance.at<float>(batch, head, i) = sum(distance[r]) * inverse;
        if (!s.kept()) return;
        const Best found = best_of(r);
        if (s.best) {
            *s.best.at<float>(batch, head, i) = total != total ? NAN : found.scores[0];
            *s.best_key.at<int64_t>(batch, head, i) = found.keys[0];
        }
        if (!s.top) return;
        if (s.scores) memcpy(s.scores.at<float>(batch, head, i), found.scores, sizeof(float) * (size_t)s.top);
        found.fill(p.start ? max(*p.start.at<int64_t>(batch, head, i), 0) : 0, p.keys);
        for (int64_t t = 0; t < s.top; t += LANES) store(found.scores + t, flush(exp(load(found.scores + t) - m) * inverse));
        memcpy(s.values.at<float>(batch, head, i), found.scores, sizeof(float) * (size_t)s.top);
        int64_t* indices = s.indices.at<int64_t>(batch, head, i);
        for (int64_t t = 0; t < s.top; t++) indices[t] = found.keys[t];
    }

    // Turns `before` into the factors that make weights of the numbers in the tiles; `inverse`: 1 / sum of each row. m
    // only rises, but for a row that had seen nothing: its weights of 0 must not meet an infinite factor.
    void divide(int64_t rows, const Softmax& softmax, const float* inverse) {
        float now[ROWS];
        for (int64_t r = 0; r < ROWS; r++) now[r] = r < rows ? softmax.reference(r) : 0.0f;
        for (float* at = before; at < before + seen * ROWS; at += ROWS)
            for (int64_t r = 0; r < rows; r += LANES)
                store(at + r, exp(min(V{}, load(at + r) - load(now + r))) * load(inverse + r));
    }

    // Row r of NaN, query i: its weights are NaN where it sees a key, and 0, not times NaN, where it sees none.
    void spoil(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t r, const RowSpans& spans) {
        for (int64_t k = 0; k < seen; k++) {
            const int64_t begin = seen_panels[k] * PANEL;
            const int32_t kind = kind_of(p, batch, head, i / ROWS, seen_panels[k]);
            const uint64_t bits = keys_seen(p, kind, batch, head, i, begin, spans.start[r], spans.stop[r]);
            float* row = all + (k * ROWS + r) * PANEL;
            for (int64_t c = 0; c < PANEL; c++)
                row[c] = bits >> c & 1 && added(p, batch, head, i, begin + c) != -INFINITY ? NAN : 0.0f;
            before[k * ROWS + r] = 1.0f;
        }
    }

    // The bias of a pair.
    static float added(const Problem& p, int64_t batch, int64_t head, int64_t i, int64_t j) {
        float dense = 0.0f;
        if (p.dense) Rows(p.dense, batch, head, i).read([&](const auto* row) { dense = number(row[j * p.dense.strides[3]]); });
        return p.relative ? dense + p.relative.at<float>(batch, head)[j - i + p.queries - 1] : dense;
    }

    // Adds the weights that the keys of the k-th panel seen receive from the rows [from, to) to the sums of a row of cells, to
    // which all these rows belong. `factors`: those of all rows.
    void columns(int64_t k, int64_t from, int64_t to, const RowSpans& spans, const float* factors) {
        const float *tile = all + k * ROWS * PANEL, *share = before + k * ROWS;
        const int64_t begin = seen_panels[k] * PANEL;
        const Columns at(spans.low, spans.high, seen_panels[k]);
        float counted[ROWS];
        for (int64_t r = from; r < to; r++) counted[r] = share[r] * factors[r];
        if (summary->received || summary->mean)
            product<true>(1, at.right - at.left, to - from, counted + from, 1, 1, tile + from * PANEL + at.left, PANEL,
                          sums + begin + at.left, PANEL);
        if (summary->peak)
            for (int64_t c = at.left; c < at.right; c += LANES) {
                V high = load(tops + begin + c);
                for (int64_t r = from; r < to; r++) high = max(load(tile + r * PANEL + c) * share[r], high);
                store(tops + begin + c, high);
            }
    }

    // The end of a row of cells: writes its sums and maxima to the results, and sets them to 0.
    void pool(const Problem& p, int64_t batch, int64_t head, int64_t cell_row, float* received) {
        const Summary& s = *summary;
        const int64_t stop = min(high, p.keys);
        if (received)
            for (int64_t j = low; j < stop; j++) received[j] += sums[j];
        int64_t j = low;
        for (int64_t cell = low / s.cell_columns; j < stop && (s.mean || s.peak); cell++) {
            const int64_t end = min(stop, (cell + 1) * s.cell_columns);
            if (s.mean) {
                double all = 0.0;
                for (int64_t x = j; x < end; x++) all += sums[x];
                s.mean.at<float>(batch, head, cell_row)[cell] = (float)all;
            }
            if (s.peak) {
                float most = 0.0f;
                for (int64_t x = j; x < end; x++) most = tops[x] > most ? tops[x] : most;
                for (int64_t x = j; odd && x < end; x++) most = tops[x] != tops[x] ? tops[x] : most;
                s.peak.at<float>(batch, head, cell_row)[cell] = most;
            }
            j = end;
        }
        clear(p);
    }

    // A tile of queries that has seen all its keys, cut where a row of cells ends; `last` is the end of its group.
    void add(const Problem& p, int64_t cell_rows, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t last,
             const Softmax& softmax, const float* inverse, float* received) {
        const RowSpans spans(p, batch, head, first, rows);
        float factors[ROWS];
        for (int64_t r = 0; r < rows; r++)
            factors[r] = summary->factors ? *summary->factors.at<float>(batch, head, first + r) : 1.0f;
        divide(rows, softmax, inverse);
        for (int64_t r = 0; r < rows; r++)
            if (inverse[r] != inverse[r]) spoil(p, batch, head, first + r, r, spans);
        for (int64_t from = 0, to; from < rows; from = to) {
            const int64_t cell_row = (first + from) / cell_rows, end = min(last, (cell_row + 1) * cell_rows);
            to = min(rows, end - first);
            for (int64_t k = 0; k < seen; k++) columns(k, from, to, spans, factors);
            for (int64_t r = from; r < to && summary->peak; r++) {  // `max` skips NaN
                if (inverse[r] == inverse[r]) continue;
                odd = true;
                for (int64_t k = 0; k < seen; k++)
                    for (int64_t c = 0; c < PANEL; c++)
                        if (all[(k * ROWS + r) * PANEL + c] != 0.0f) tops[seen_panels[k] * PANEL + c] = NAN;
            }
            if (seen) low = min(low, spans.low / LANES * LANES), high = max(high, round_up(spans.high, LANES));
            if (first + to == end) pool(p, batch, head, cell_row, received);
        }
    }

    // `sums` and `tops` hold 0 but for the keys [low, high).
    void start(const Problem& p) {
        low = 0, high = keeps(*summary) ? panels(p) * PANEL : 0;
        clear(p);
    }
    void clear(const Problem& p) {
        const int64_t from = min(low, high), count = high - from;
        memset(sums + from, 0, sizeof(float) * (size_t)count), memset(tops + from, 0, sizeof(float) * (size_t)count);
        low = p.keys, high = 0, odd = false;
    }
};

// The work: each head's queries in groups of some tiles, cut where rows of cells end, and dealt out to `parts`, each of
// which sums the weights that keys receive by itself. All threads work on one head at a time, so they read the same keys;
// and where the mask is causal, the parts are of one size.
struct SummaryShares {
    static constexpr int64_t SUMS = 1 << 22;  // about so many numbers in all, if that is enough

    int64_t heads, parts, queries, cell_rows;  // where no map is wanted, a tile counts as a row of cells

    SummaryShares(const Problem& p, const Summary& s) {
        heads = p.batch * p.heads;
        cell_rows = s.mean || s.peak ? s.cell_rows : ROWS;
        queries = cell_rows > ROWS ? cell_rows : ROWS / cell_rows * cell_rows;
        const int64_t busy = (2 * p.threads + heads - 1) / max(heads, 1);  // for all threads to have work
        parts = max(busy, min(p.threads, SUMS / max(1, heads * p.keys)));
        parts = max(1, min(parts, (p.queries + queries - 1) / queries));
    }
};

template <class Score>
int64_t summary_floats(const Problem& p, const Summary& s) {
    Memory shared, own;
    Packed<Score>().take(p, shared);
    const SummaryShares by(p, s);
    if (s.received) shared.take(by.parts * by.heads * p.keys);
    Forward<Score>().take(p, own);
    Summarise<Score>().take(p, s, own);
    return shared.used + p.threads * own.used;
}

// Returns whether all inputs read, and the output, are finite.
template <class Score>
bool summarise(const Problem& p, const Summary& s, float* workspace) {
    float finite = 0.0f;
    Memory shared{workspace}, counted;
    Packed<Score> packed;
    packed.take(p, shared);
    const SummaryShares by(p, s);
    float* received = s.received ? shared.take(by.parts * by.heads * p.keys) : nullptr;
    Forward<Score>().take(p, counted);
    Summarise<Score>().take(p, s, counted);
#pragma omp parallel num_threads(p.threads) reduction(+ : finite)
    {
        Memory own{workspace + shared.used + thread() * counted.used};
        Forward<Score> pass;
        Summarise<Score> reduction;
        pass.take(p, own), reduction.take(p, s, own), reduction.start(p);
        Softmax softmax;
        float inverse[ROWS];
        pack_all(p, packed, finite);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < by.heads * by.parts; unit++) {
            const int64_t of = unit / by.parts, part = unit % by.parts, batch = of / p.heads, head = of % p.heads;
            float* to_keys = received ? received + (part * by.heads + of) * p.keys : nullptr;
            if (to_keys) memset(to_keys, 0, sizeof(float) * (size_t)p.keys);
            for (int64_t start = part * by.queries; start < p.queries; start += by.parts * by.queries) {
                const int64_t end = min(p.queries, start + by.queries);
                for (int64_t first = start; first < end; first += ROWS) {
                    const int64_t rows = min(ROWS, end - first);
                    reduction.begin(batch, head, first, rows);
                    pass.pass(p, packed, batch, head, first, rows, softmax, reduction, finite);
                    for (int64_t r = 0; r < rows; r++) {
                        inverse[r] = Softmax::inverse(softmax.total(r, sink_of(p, head)));
                        reduction.row(p, batch, head, first + r, r, softmax, inverse[r]);
                        if (p.out) pass.write(p, batch, head, first + r, r, inverse[r], finite);
                    }
                    if (reduction.keeps(s)) reduction.add(p, by.cell_rows, batch, head, first, rows, end, softmax, inverse, to_keys);
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
    return finite == 0.0f;
}

}  // namespace clearhead::CLEARHEAD_ISA
