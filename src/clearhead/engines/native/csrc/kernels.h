// The kernels of one instruction set. They allocate nothing: each has a function that says how many floats it needs.
#pragma once

#include "problem.h"

namespace clearhead {

struct Kernels {
    int lanes;  // floats to a vector register
    int64_t (*forward_floats)(const Problem&);
    bool (*forward)(const Problem&, float* workspace);  // whether all inputs read, and the output, are finite
    int64_t (*decode_floats)(const Problem&);
    bool (*decode)(const Problem&, float* workspace);
    int64_t (*backward_floats)(const Problem&, const Gradients&);
    void (*backward)(const Problem&, const Gradients&, float* workspace);
    int64_t (*summary_floats)(const Problem&, const Summary&);
    bool (*summarise)(const Problem&, const Summary&, float* workspace);
    int64_t (*scores_floats)(const Problem&);
    void (*scores)(const Problem&, float* workspace);
    int64_t (*contributions_floats)(const Problem&, const Gradients&);
    void (*contributions)(const Problem&, const Gradients&, float* workspace);
};

}  // namespace clearhead
