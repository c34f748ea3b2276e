#include "algorithm.inl"
#include "lanes_sve.h"

namespace superoffload::adam {

const Kernels kSveKernels = kernels_of<SveLanes>("sve");

}  // namespace superoffload::adam
