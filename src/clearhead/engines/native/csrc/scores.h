// The scores themselves, of a whole problem or of a part of one.
#pragma once

#include "forward.h"

namespace clearhead::CLEARHEAD_ISA {

template <class Score>
struct Scores {
    float *queries, *tile;

    void take(const Problem& p, Memory& memory) {
        queries = memory.take(Score::query_floats(p));
        tile = memory.take(ROWS * PANEL);
    }

    // A tile of queries, to the problem's `out` (B, H, Lq, Lk); -inf where a pair is not allowed.
    void run(const Problem& p, const Packed<Score>& packed, int64_t batch, int64_t head, int64_t first, float& finite) {
        const int64_t rows = min(ROWS, p.queries - first), key_head = head / p.groups();
        const RowSpans spans(p, batch, head, first, rows);
        Score::pack_queries(p, Rows(p.query, batch, head, first), rows, queries, finite);
        for (int64_t r = 0; r < rows; r++) {
            float* to = p.out.at<float>(batch, head, first + r);
            for (int64_t j = 0; j < p.keys; j++) to[j] = -INFINITY;
        }
        for (int64_t panel = spans.low / PANEL;; panel++) {
            const Block block = next_block(p, batch, head, first / ROWS, panel);
            panel = block.panel;
            const int64_t begin = panel * PANEL;
            if (begin >= spans.high) break;
            for (const Part& at : Parts(p, spans, batch, head, first, rows, block)) {
                Score::scores(p, queries, packed.panel_at(p, batch, key_head, panel),
                              Rows(p.key, batch, key_head, begin), at, tile);
                for (int64_t r = at.top; r < at.bottom; r++) {
                    float* s = tile + r * PANEL;
                    finish(p, batch, head, first + r, begin, at, spans.start[r], spans.stop[r], block.kind, s);
                    memcpy(p.out.at<float>(batch, head, first + r) + begin + at.first, s + at.first,
                           sizeof(float) * (size_t)at.keys());
                }
            }
        }
    }
};

template <class Score>
int64_t scores_floats(const Problem& p) { return tiles_floats<Score, Scores<Score>>(p); }
template <class Score>
void scores(const Problem& p, float* workspace) { each_tile<Score, Scores<Score>>(p, workspace); }

}  // namespace clearhead::CLEARHEAD_ISA
