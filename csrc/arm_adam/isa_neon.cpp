#include "algorithm.inl"
#include "lanes_neon.h"

namespace superoffload::adam {

const Kernels kNeonKernels = kernels_of<NeonLanes>("neon");

}  // namespace superoffload::adam
