// All kernels for one instruction set: this file is compiled once for each (CMakeLists.txt), under a name of its own.
#include "kernels.h"

#include "backward.h"
#include "contributions.h"
#include "decode.h"
#include "forward.h"
#include "pairs.h"
#include "scores.h"
#include "summarise.h"

namespace clearhead::CLEARHEAD_ISA {

// The function for the problem's phi.
#define FOR_PHI(FUNCTION, ...)                                \
    switch (p.phi) {                                          \
        case MUL: return FUNCTION<Mul>(__VA_ARGS__);          \
        case TANH_ADD: return FUNCTION<TanhAdd>(__VA_ARGS__); \
        default: return FUNCTION<SqDiff>(__VA_ARGS__);        \
    }

// The same, on pairs of bfloat16 where this instruction set has them.
#ifdef __AVX512BF16__
#define ON_PAIRS(FUNCTION, ...)                                     \
    if (MulPairs::takes(p)) return FUNCTION<MulPairs>(__VA_ARGS__); \
    FOR_PHI(FUNCTION, __VA_ARGS__)
#define VALUES_ON_PAIRS(FUNCTION, ...)                                  \
    if (ValuePairs::takes(p)) return FUNCTION<ValuePairs>(__VA_ARGS__); \
    ON_PAIRS(FUNCTION, __VA_ARGS__)
#else
#define ON_PAIRS(FUNCTION, ...) FOR_PHI(FUNCTION, __VA_ARGS__)
#define VALUES_ON_PAIRS(FUNCTION, ...) FOR_PHI(FUNCTION, __VA_ARGS__)
#endif

static int64_t forward_memory(const Problem& p) { VALUES_ON_PAIRS(forward_floats, p) }
static bool run_forward(const Problem& p, float* workspace) { VALUES_ON_PAIRS(forward, p, workspace) }
static int64_t decode_memory(const Problem& p) { FOR_PHI(decode_floats, p) }
static bool run_decode(const Problem& p, float* workspace) { FOR_PHI(decode, p, workspace) }
static int64_t backward_memory(const Problem& p, const Gradients& g) { VALUES_ON_PAIRS(backward_floats, p, g) }
static void run_backward(const Problem& p, const Gradients& g, float* workspace) { VALUES_ON_PAIRS(backward, p, g, workspace) }
static int64_t summary_memory(const Problem& p, const Summary& s) { VALUES_ON_PAIRS(summary_floats, p, s) }
static bool run_summary(const Problem& p, const Summary& s, float* workspace) { VALUES_ON_PAIRS(summarise, p, s, workspace) }
static int64_t scores_memory(const Problem& p) { ON_PAIRS(scores_floats, p) }
static void run_scores(const Problem& p, float* workspace) { ON_PAIRS(scores, p, workspace) }
static int64_t contributions_memory(const Problem& p, const Gradients& g) { ON_PAIRS(contributions_floats, p, g) }
static void run_contributions(const Problem& p, const Gradients& g, float* workspace) { ON_PAIRS(contributions, p, g, workspace) }

extern const Kernels KERNELS;
const Kernels KERNELS{LANES,           forward_memory, run_forward,    decode_memory, run_decode,
                      backward_memory, run_backward,   summary_memory, run_summary, scores_memory, run_scores,
                      contributions_memory, run_contributions};

}  // namespace clearhead::CLEARHEAD_ISA
