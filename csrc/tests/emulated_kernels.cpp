// Runs csrc/cuda on this processor, by one function that takes a kernel's name and cuLaunchKernel's arguments.
#include "cuda_shim.h"
//
#include "arm_adam/float_environment.h"
#include "cuda/kernels.cu"

namespace {

struct Kernel {
    const char* name;
    void (*launch)(unsigned grid, unsigned block, void** arguments);
};

template <typename... Types, std::size_t... index>
void call(void (*kernel)(Types...), void** arguments, std::index_sequence<index...>) {
    kernel(*static_cast<std::remove_reference_t<Types>*>(arguments[index])...);
}

template <typename... Types>
void launch(void (*kernel)(Types...), unsigned grid, unsigned block, void** arguments) {
    shim::launch(grid, block, [=] { call(kernel, arguments, std::index_sequence_for<Types...>{}); });
}

#define ENTRY(name) \
    {#name, [](unsigned grid, unsigned block, void** arguments) { launch(name, grid, block, arguments); }},
#define PACK_ENTRY(gradient, Gradient) ENTRY(pack_##gradient)
#define UNPACK_ENTRY(bits, Word) ENTRY(unpack_##bits)
#define STEP_ENTRIES(name) ENTRY(name) ENTRY(name##_noisy) ENTRY(name##_q8)
#define STEP_ENTRY(from, From, to, To) STEP_ENTRIES(step_##from##_##to)
#define SPLIT_STEP_ENTRY(from, From) STEP_ENTRIES(step_##from##_split)

const Kernel kKernels[] = {SUPEROFFLOAD_PACK_KERNELS(PACK_ENTRY) SUPEROFFLOAD_UNPACK_KERNELS(UNPACK_ENTRY)
                               SUPEROFFLOAD_STEP_KERNELS(STEP_ENTRY) SUPEROFFLOAD_SPLIT_STEP_KERNELS(SPLIT_STEP_ENTRY)
                                   ENTRY(sum_bits) ENTRY(compare_bits)};

}  // namespace

// Returns the name of kernel `index`; null after the last one.
extern "C" __attribute__((visibility("default"))) const char* emulated_kernel(unsigned index) {
    return index < sizeof kKernels / sizeof *kKernels ? kKernels[index].name : nullptr;
}

// Launches a kernel and returns when it is done; arguments[i] points to argument i. An unknown name ends the process,
// so that no launch goes unnoticed.
extern "C" __attribute__((visibility("default"))) void emulate_launch(const char* name, unsigned grid, unsigned block,
                                                                      void** arguments) {
    const superoffload::FloatEnvironment environment;
    for (const Kernel& kernel : kKernels) {
        if (std::strcmp(kernel.name, name) == 0) {
            kernel.launch(grid, block, arguments);
            return;
        }
    }
    std::fprintf(stderr, "emulate_launch: no kernel is called %s\n", name);
    std::abort();
}
