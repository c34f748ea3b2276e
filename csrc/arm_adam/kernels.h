// The table of kernels that one instruction set supplies. Internal to csrc/arm_adam.
#pragma once

#include "adam.h"

namespace superoffload::adam {

struct Kernels {
    const char* name;
    void (*step)(const Run&, Range);
    bool (*step_journaled)(const Run&, Range);
    void (*undo)(const Run&, Range);
    void (*replay)(const Run&, Range, const Scalars&);
    void (*publish)(const Run&, Range);
    void (*pack)(const void*, void*, ElementType, std::size_t, double*);  // destination null: only sum
};

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kNeonKernels;
extern const Kernels kSveKernels;

}  // namespace superoffload::adam
