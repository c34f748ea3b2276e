#include "algorithm.inl"

namespace superoffload::adam {

const Kernels kScalarKernels = kernels_of<ScalarLanes>("scalar");

}  // namespace superoffload::adam
