// One attention, as the kernels read it: plain numbers and pointers, the same for every instruction set.
#pragma once

#include <cstdint>

namespace clearhead {

// The types of an operand's numbers; those of 16 bits are read as float32 (elements.h).
enum Element : int { FLOAT32, BFLOAT16, FLOAT16 };
struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

// An array somewhere in memory, of up to four dimensions (batch, head, row, column). Strides count elements; a stride of
// 0 repeats. No data: there is no such array.
struct Array {
    void* data = nullptr;
    int64_t strides[4] = {0, 0, 0, 0};
    Element element = FLOAT32;  // where its numbers are floating-point numbers

    explicit operator bool() const { return data != nullptr; }

    template <class T>
    T* at(int64_t batch, int64_t head, int64_t row = 0) const {
        return static_cast<T*>(data) + batch * strides[0] + head * strides[1] + row * strides[2];
    }
};

constexpr int64_t ROWS = 48;   // queries to a tile
constexpr int64_t PANEL = 64;  // keys to a panel

// The keys [from, to) among those from `begin` on, a panel of them, as bits.
inline uint64_t inside(int64_t from, int64_t to, int64_t begin) {
    const int64_t low = from > begin ? from - begin : 0, high = to - begin < PANEL ? to - begin : PANEL;
    if (high <= low) return 0;
    return (high == PANEL ? ~0ull : (1ull << high) - 1) & ~((1ull << low) - 1);
}

// Which pairs are seen in a block, a tile of ROWS queries with a panel of PANEL keys: a number from 0 on is its place in `bits`.
enum Kind : int32_t { NONE = -1, ALL = -2, BY_SPANS = -3 };

// The panels [first, last) of a tile, in whose blocks a pair is seen; `kind`: of the first of them. Numbers from 0 on count up.
struct Run {
    int32_t first, last, kind;

    int32_t kind_at(int64_t panel) const { return kind < 0 ? kind : kind + (int32_t)(panel - first); }
};

// The runs [begin, end) of one tile, in order. In the blocks outside of them no pair is seen.
struct Runs {
    int64_t begin, end;
};

// All phi, in the order of PHIS in scores/pair_functions.py: name, name in Python, and the score that kernels.cpp includes.
#define CLEARHEAD_PHIS(PHI)            \
    PHI(MUL, "mul", Mul)               \
    PHI(TANH_ADD, "tanh_add", TanhAdd) \
    PHI(SQ_DIFF, "sq_diff", SqDiff)

enum Phi : int64_t {
#define CLEARHEAD_PHI(PHI, NAME, SCORE) PHI,
    CLEARHEAD_PHIS(CLEARHEAD_PHI)
#undef CLEARHEAD_PHI
    PHI_COUNT
};

// scores = softcap(scale * sum_d weight_d phi(query_d, key_d)) + bias, -inf outside the spans and `keep`;
// weights = softmax over keys, with the sinks in its denominator; out = dropout(weights) * value.
struct Problem {
    int64_t phi = MUL;
    int64_t batch = 0, heads = 0, key_heads = 0, queries = 0, keys = 0, width = 0, value_width = 0;
    int64_t threads = 1;
    double scale = 1.0;
    double softcap = 0.0;  // 0: none

    Array query, key, value;  // of any element type: (B, H, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Ev); columns stand side by side
    Array weight;             // float (D): strides[0]; none: ones
    Array sinks;              // float (H): strides[0]
    Array start, stop;        // int64 (B, H, Lq): query i sees the keys start <= j < stop, outside of its gaps
    Array gap_start, gap_stop;  // int64 (B, H, Lq, gaps)
    int64_t gaps = 0;
    Array tiles;              // Runs (B, H, tiles of ROWS queries): the map of blocks; none: by the spans alone
    const Run* runs = nullptr;       // of all tiles
    const uint64_t* bits = nullptr;  // (n, ROWS): of each row of a block with a residual, its keys as bits
    Array dense;              // of any element type: (B, H, Lq, Lk), added to the scores
    Array relative;           // float (B, H, Lq + Lk - 1), added along the diagonals: entry j - i + Lq - 1
    Array bad_queries;        // float (B, H, Lq), 0 or NaN, added to the scores
    Array bad_keys;           // float (B, Hk, Lk), the same

    double dropout_p = 0.0;
    uint64_t seed = 0;
    int64_t first_query = 0;  // the index of query 0 in the dropout's hash, where these are some queries of more

    Array out;  // float (B, H, Lq, Ev); for the kernel `scores`, (B, H, Lq, Lk)
    // float (B, H, Lq), which may be missing: m, the largest score or the sink (0 where nothing is seen), and log sum_j exp(s_j - m)
    Array maximum, log_sum;
    bool merges = false;  // the three hold the results of other keys, with which those of these keys are merged

    int64_t groups() const { return heads / key_heads; }

    // Whether nothing but the spans comes between the scores and their softmax.
    bool plain() const { return !(softcap > 0) && !dense && !relative && !bad_keys; }
};

// The buffers of a summary of the weights; each may be missing. The problem's `out`, `maximum` and `log_sum` are filled too.
struct Summary {
    Array entropy;            // float (B, H, Lq)
    Array distance;           // float (B, H, Lq): sum_j w_ij |position_i - j|
    Array position;           // int64 (B, H, Lq): where each query stands among the keys
    Array best, best_key;     // float and int64 (B, H, Lq): the largest score, and its key (-1: none)
    Array values, indices;    // float and int64 (B, H, Lq, top): the largest weights, and their keys
    Array scores;             // float (B, H, Lq, top): their scores
    Array received;           // float (B, H, Lk)
    Array mean, peak;         // float (B, H, rows, columns): sums and maxima of the cells of a map
    Array factors;            // float (B, H, Lq), of the queries in `received` and `mean`
    int64_t top = 0;
    int64_t cell_rows = 1, cell_columns = 1;

    // How many of the largest scores are kept.
    int64_t kept() const { return best ? (top > 1 ? top : 1) : top; }
};

// The gradients that statistics send back to the weights; each may be missing. They are float unless a type is named.
struct Sent {
    Array log_weight;         // (B, H, Lq), times log w_ij
    Array distance, position; // (B, H, Lq), times |position_i - j|; position is int64
    Array best, best_key;     // (B, H, Lq), to the score of best_key, int64
    Array values, indices;    // (B, H, Lq, k), to the weights of indices, int64 and ascending
    Array received;           // (B, H, Lk)
    Array mean;               // (B, H, rows, columns)
    Array factors;            // (B, H, Lq), of the queries in `received` and `mean`
    int64_t k = 0;
    int64_t cell_rows = 1, cell_columns = 1;
};

// The arrays that a backward pass reads, and the gradients that it writes. Weights are exp(score - maximum - log_sum): of the
// whole softmax, also where the problem has some of its keys. log_sum is +inf for a query that sees nothing.
struct Gradients {
    Array grad;                      // of any element type: (B, H, Lq, Ev), the output's
    Array maximum, log_sum, delta;   // float (B, H, Lq): delta is sum_e grad * out
    Array query, key, value;         // float, as the problem's
    Array weight;                    // float (D)
    Array dense, relative;           // float, as the problem's bias, of strides 0 where it is broadcast; missing: not wanted
    int64_t dense_size = 0, relative_size = 0;  // elements in all
    Sent sent;
    bool adds = false;  // to the numbers in query, key and value; the other gradients are always added

    // For the kernel `contributions`, which writes nothing else: float (B, H, Lq) and (B, H, Lk), which may be missing.
    Array by_query, by_key;
    bool positive = false;  // sums the products above 0 alone
};

}  // namespace clearhead
