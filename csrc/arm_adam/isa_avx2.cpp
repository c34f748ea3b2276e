#include "algorithm.inl"
#include "lanes_avx2.h"

namespace superoffload::adam {

const Kernels kAvx2Kernels = kernels_of<Avx2Lanes>("avx2");

}  // namespace superoffload::adam
