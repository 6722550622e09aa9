// All kernels for one instruction set: this file is compiled once for each (CMakeLists.txt), under a name of its own.
#include "kernels.h"

#include "backward.h"
#include "contributions.h"
#include "decode.h"
#include "forward.h"
#include "pairs.h"
#include "scores.h"
#include "sq_diff.h"
#include "summarise.h"
#include "tanh_add.h"

namespace clearhead::CLEARHEAD_ISA {

// Calls a function with the score of the problem's phi.
template <class Function>
INLINE auto for_phi(const Problem& p, const Function& function) {
    switch ((Phi)p.phi) {
#define CLEARHEAD_PHI(PHI, NAME, SCORE) case PHI: return function(SCORE{});
        CLEARHEAD_PHIS(CLEARHEAD_PHI)
#undef CLEARHEAD_PHI
        case PHI_COUNT: break;
    }
    __builtin_unreachable();
}

// The same, on pairs of bfloat16 where this instruction set has them: of the scores, and of the values too.
template <class Function>
INLINE auto on_pairs(const Problem& p, const Function& function) {
#ifdef __AVX512BF16__
    if (MulPairs::takes(p)) return function(MulPairs{});
#endif
    return for_phi(p, function);
}
template <class Function>
INLINE auto values_on_pairs(const Problem& p, const Function& function) {
#ifdef __AVX512BF16__
    if (ValuePairs::takes(p)) return function(ValuePairs{});
#endif
    return on_pairs(p, function);
}

// A function of a pass, for the score that `CHOOSE` finds.
#define PASS(CHOOSE, FUNCTION, ...) CHOOSE(p, [&](auto score) { return FUNCTION<decltype(score)>(__VA_ARGS__); })

static int64_t forward_memory(const Problem& p) { return PASS(values_on_pairs, forward_floats, p); }
static bool run_forward(const Problem& p, float* workspace) { return PASS(values_on_pairs, forward, p, workspace); }
static int64_t decode_memory(const Problem& p) { return PASS(for_phi, decode_floats, p); }
static bool run_decode(const Problem& p, float* workspace) { return PASS(for_phi, decode, p, workspace); }
static int64_t backward_memory(const Problem& p, const Gradients& g) { return PASS(values_on_pairs, backward_floats, p, g); }
static void run_backward(const Problem& p, const Gradients& g, float* workspace) { PASS(values_on_pairs, backward, p, g, workspace); }
static int64_t summary_memory(const Problem& p, const Summary& s) { return PASS(values_on_pairs, summary_floats, p, s); }
static bool run_summary(const Problem& p, const Summary& s, float* workspace) { return PASS(values_on_pairs, summarise, p, s, workspace); }
static int64_t scores_memory(const Problem& p) { return PASS(on_pairs, scores_floats, p); }
static void run_scores(const Problem& p, float* workspace) { PASS(on_pairs, scores, p, workspace); }
static int64_t contributions_memory(const Problem& p, const Gradients& g) { return PASS(on_pairs, contributions_floats, p, g); }
static void run_contributions(const Problem& p, const Gradients& g, float* workspace) { PASS(on_pairs, contributions, p, g, workspace); }

extern const Kernels KERNELS;
const Kernels KERNELS{LANES,           forward_memory, run_forward,    decode_memory, run_decode,
                      backward_memory, run_backward,   summary_memory, run_summary, scores_memory, run_scores,
                      contributions_memory, run_contributions};

}  // namespace clearhead::CLEARHEAD_ISA
