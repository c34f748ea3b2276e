// The inner loops of the kernels as functions of their own, for static analysis (mca.py): AdamW, bf16 gradient, bf16
// shadow, one-byte codes. Compiled once per lane type (GRACE_LANES), type of the moments (GRACE_MOMENTS) and form of
// the masters (GRACE_SPLIT), with the flags that the extension is built with.
#include "arm_adam/algorithm.inl"
#include "arm_adam/lanes_neon.h"
#ifdef __ARM_FEATURE_SVE
#include "arm_adam/lanes_sve.h"
#endif

namespace superoffload::adam {

using Lanes = GRACE_LANES;
using LoopTypes = Types<ElementType::bf16, ElementType::bf16, ElementType::GRACE_MOMENTS, GRACE_SPLIT>;

// Compilers make two loops where an L2 penalty is possible.
inline Scalars without_l2(Scalars scalars) {
    scalars.l2 = false;
    return scalars;
}

inline Run without_l2(Run run) {
    run.frozen = without_l2(run.frozen);
    return run;
}

extern "C" {

void grace_step(const Run& run, std::size_t begin, std::size_t end) {
    if (run.shadow == nullptr) __builtin_unreachable();  // or there are two loops, with and without a shadow
    if (run.places != nullptr) __builtin_unreachable();  // a part in one run: there is a loop for either
    step_lanes<Lanes, LoopTypes>(without_l2(run), begin, end);
}

void grace_step_journaled(const Run& run, std::size_t begin, std::size_t end, BlockEscapes& escapes) {
    if (run.places != nullptr) __builtin_unreachable();
    journal_lanes<Lanes, LoopTypes, 1>(without_l2(run), run.journal.codes + begin, begin, {begin, end}, escapes);
}

void grace_undo(const Run& run, std::size_t begin, std::size_t end, EscapeCursor& escapes) {
    undo_lanes<Lanes, LoopTypes, 1>(without_l2(run), begin, {begin, end}, escapes);
}

void grace_replay(const Run& run, const Scalars& again, std::size_t begin, std::size_t end, EscapeCursor& escapes) {
    if (run.shadow == nullptr) __builtin_unreachable();
    if (run.places != nullptr) __builtin_unreachable();
    replay_lanes<Lanes, LoopTypes, 1>(without_l2(run), without_l2(again), begin, {begin, end}, escapes);
}

void grace_publish(const Run& run, std::size_t begin, std::size_t end) {
    if (run.places != nullptr) __builtin_unreachable();
    publish_lanes<Lanes, LoopTypes>(without_l2(run), begin, end);
}

}  // extern "C"
}  // namespace superoffload::adam
