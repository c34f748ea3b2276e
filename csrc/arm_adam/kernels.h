// Declares the table of kernels that each instruction set supplies. Internal to csrc/arm_adam.
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
    void (*pack)(const void*, void*, ElementType, std::size_t, double*);  // a null destination means sums only
};

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kNeonKernels;
extern const Kernels kSveKernels;

}  // namespace superoffload::adam
