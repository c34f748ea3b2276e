// Compiles only if the driver's functions in cuda.h have the types that csrc/cuda/driver.h gives them. Needs CUDA's
// headers, so it is skipped where they are not installed (csrc/tests/Makefile).
#include <cuda.h>

#include <type_traits>

#include "cuda/driver.h"

namespace {

// Maps CUDA's types to ours: enumerations are ints in the binary interface, handles are pointers to equal structures.
template <typename T>
struct Plain {
    using type = std::conditional_t<std::is_enum_v<T>, int, T>;
};
template <typename T>
struct Plain<T*> {
    using type = typename Plain<T>::type*;
};
template <typename T>
struct Plain<const T*> {
    using type = const typename Plain<T>::type*;
};
template <>
struct Plain<CUctx_st*> {
    using type = superoffload::cuda::Context;
};
template <>
struct Plain<CUstream_st*> {
    using type = superoffload::cuda::Stream;
};
template <>
struct Plain<CUevent_st*> {
    using type = superoffload::cuda::Event;
};
template <>
struct Plain<CUmod_st*> {
    using type = superoffload::cuda::Module;
};
template <>
struct Plain<CUfunc_st*> {
    using type = superoffload::cuda::Function;
};
template <typename T>
struct Signature;
template <typename R, typename... Parameters>
struct Signature<R (*)(Parameters...)> {
    using type = typename Plain<R>::type (*)(typename Plain<Parameters>::type...);
};

using superoffload::cuda::Driver;

// Uses decltype of the symbol's own name: the macros of cuda.h do not change names that end in _v2.
#define SUPEROFFLOAD_COMPARE(name, symbol, parameters) \
    static_assert(std::is_same_v<Signature<decltype(&::symbol)>::type, decltype(Driver::name)>, #symbol);
SUPEROFFLOAD_DRIVER_FUNCTIONS(SUPEROFFLOAD_COMPARE)

}  // namespace

static_assert(int(CUDA_SUCCESS) == int(superoffload::cuda::kSuccess));
static_assert(int(CUDA_ERROR_OUT_OF_MEMORY) == int(superoffload::cuda::kOutOfMemory));
static_assert(int(CUDA_ERROR_DEINITIALIZED) == int(superoffload::cuda::kDeinitialized));
static_assert(int(CUDA_ERROR_NOT_FOUND) == int(superoffload::cuda::kNotFound));
static_assert(int(CUDA_ERROR_NOT_READY) == int(superoffload::cuda::kNotReady));
static_assert(int(CUDA_ERROR_NOT_SUPPORTED) == int(superoffload::cuda::kNotSupported));
static_assert(int(CU_EVENT_DISABLE_TIMING) == int(superoffload::cuda::kEventDisableTiming));
static_assert(int(CU_MEMHOSTREGISTER_PORTABLE) == int(superoffload::cuda::kRegisterPortable));
static_assert(int(CU_MEMHOSTREGISTER_DEVICEMAP) == int(superoffload::cuda::kRegisterDeviceMap));
static_assert(int(CU_STREAM_WRITE_VALUE_DEFAULT) == int(superoffload::cuda::kWriteValueDefault));
static_assert(int(CU_STREAM_CAPTURE_MODE_RELAXED) == int(superoffload::cuda::kCaptureModeRelaxed));
