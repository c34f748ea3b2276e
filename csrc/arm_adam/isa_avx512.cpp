// GCC 12's own AVX-512 header trips this warning wherever an intrinsic leaves a register undefined on purpose.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "algorithm.inl"
#include "lanes_avx512.h"

namespace superoffload::adam {

const Kernels kAvx512Kernels = kernels_of<Avx512Lanes>("avx512");

}  // namespace superoffload::adam
