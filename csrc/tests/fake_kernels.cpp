// The kernels of the fake driver: those of the library named in FAKE_CUDA_KERNELS (emulate_launch), or plain loops of
// the same meaning.
#include "fake_kernels.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "arm_adam/lanes_scalar.h"
#include "cuda/device_bucket.h"

namespace fake {
namespace {

using superoffload::adam::ScalarLanes;
using superoffload::cuda::CopyPiece;

using Emulate = void (*)(const char*, unsigned, unsigned, void**);

Emulate emulated_kernels() {
    static const Emulate found = [] {
        const char* const library = std::getenv("FAKE_CUDA_KERNELS");
        if (library == nullptr) return Emulate{nullptr};
        void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            std::fprintf(stderr, "FAKE_CUDA_KERNELS: %s\n", dlerror());
            std::abort();
        }
        return reinterpret_cast<Emulate>(dlsym(handle, "emulate_launch"));
    }();
    return found;
}

float load(const std::string& type, const void* memory, std::uint64_t i) {
    if (type == "bf16") return ScalarLanes::load_bf16(static_cast<const std::uint16_t*>(memory) + i);
    if (type == "f16") return ScalarLanes::load_f16(static_cast<const std::uint16_t*>(memory) + i);
    return static_cast<const float*>(memory)[i];
}

// A value of the type it has already keeps its bits, NaN payloads included.
void convert(const std::string& from, const std::string& to, const void* source, std::uint64_t s, void* target,
             std::uint64_t t) {
    if (from == to) {
        const std::size_t size = from == "f32" ? 4 : 2;
        std::memcpy(static_cast<char*>(target) + size * t, static_cast<const char*>(source) + size * s, size);
        return;
    }
    const float x = load(from, source, s);
    if (to == "bf16") return ScalarLanes::store_bf16(static_cast<std::uint16_t*>(target) + t, x);
    if (to == "f16") return ScalarLanes::store_f16(static_cast<std::uint16_t*>(target) + t, x);
    static_cast<float*>(target)[t] = x;
}

double sum_of_block(const std::string& type, const void* gradient, std::uint64_t begin, std::uint64_t end) {
    double s[16] = {};
    for (std::uint64_t i = begin; i < end; ++i) {
        const double x = load(type, gradient, i);
        s[(i - begin) % 16] += x * x;
    }
    for (int half = 8; half >= 1; half /= 2) {
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    }
    return s[0] - s[0] == 0 ? s[0] : __builtin_inf();
}

// What one plain loop is about.
struct Loop {
    bool packs;
    std::string from;
    std::string to;
    void* buffer;
    double* sums;
};

void run_piece(const Loop& loop, const CopyPiece& piece) {
    auto* const there = reinterpret_cast<void*>(piece.address);
    for (std::uint64_t i = 0; i < piece.numel; ++i) {
        if (loop.packs) {
            convert(loop.from, loop.to, there, i, loop.buffer, piece.offset + i);
        } else {
            convert(loop.from, loop.to, loop.buffer, piece.offset + i, there, i);
        }
    }
    constexpr std::uint64_t kBlock = superoffload::adam::kBlock;
    for (std::uint64_t b = 0; loop.packs && b * kBlock < piece.numel; ++b) {
        const std::uint64_t end = std::min<std::uint64_t>(piece.numel, (b + 1) * kBlock);
        loop.sums[piece.first_block + b] = sum_of_block(loop.from, there, b * kBlock, end);
    }
}

}  // namespace

// As csrc/cuda/kernels.cu defines them.
const std::set<std::string>& kernel_names() {
    static const std::set<std::string> names = [] {
        std::set<std::string> made;
        for (const char* same : {"f32_f32", "bf16_bf16", "f16_f16"}) {
            for (const char* kind : {"pack_", "unpack_", "step_"}) made.insert(std::string(kind) + same);
        }
        for (const char* type : {"bf16", "f16"}) {
            made.insert(std::string("pack_") + type + "_f32");
            made.insert(std::string("unpack_f32_") + type);
            made.insert(std::string("step_f32_") + type);
        }
        for (const std::string& name : std::set<std::string>(made)) {
            if (name.rfind("step_", 0) == 0) made.insert(name + "_noisy");
        }
        return made;
    }();
    return names;
}

void run_kernel(const std::string& name, unsigned grid, unsigned block, void** arguments) {
    if (const Emulate emulate = emulated_kernels()) {
        emulate(name.c_str(), grid, block, arguments);
        return;
    }
    const std::size_t first = name.find('_');
    const std::size_t second = name.find('_', first + 1);
    const bool packs = name.rfind("pack", 0) == 0;
    const Loop loop{packs, name.substr(first + 1, second - first - 1), name.substr(second + 1),
                    *static_cast<void**>(arguments[2]), packs ? *static_cast<double**>(arguments[3]) : nullptr};
    const auto* const pieces = *static_cast<const CopyPiece**>(arguments[0]);
    const unsigned count = *static_cast<unsigned*>(arguments[1]);
    for (unsigned p = 0; p < count; ++p) run_piece(loop, pieces[p]);
}

}  // namespace fake
