// Runs the fake driver's kernels: those of the library named in FAKE_CUDA_KERNELS (emulate_launch), or plain loops with
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

// Copies between a piece's tensor and its place in the packed gradient or in staging memory.
void run_piece(const std::string& name, const CopyPiece& piece, void* buffer, double* sums) {
    const std::string type = name.substr(name.find('_') + 1);
    const std::size_t size = type == "f32" || type == "32" ? 4 : 2;
    auto* const there = reinterpret_cast<void*>(piece.address);
    auto* const here = static_cast<char*>(buffer) + size * piece.offset;
    if (sums == nullptr) {
        std::memcpy(there, here, size * piece.numel);
        return;
    }
    std::memcpy(here, there, size * piece.numel);
    constexpr std::uint64_t kBlock = superoffload::adam::kBlock;
    for (std::uint64_t b = 0; b * kBlock < piece.numel; ++b) {
        const std::uint64_t end = std::min<std::uint64_t>(piece.numel, (b + 1) * kBlock);
        sums[piece.first_block + b] = sum_of_block(type, there, b * kBlock, end);
    }
}

// Sums plainly: whole blocks as sums of words times their place and its square, which show all changes that tests make.
struct SumPiece {
    const std::uint16_t* memory;
    std::uint64_t* sums;
    unsigned long long numel;
    unsigned long long first_block;
};

template <typename Piece>
const Piece* pieces_of(const void* argument) {
    const auto& table = *static_cast<const superoffload::cuda::TableArgument*>(argument);
    return table.longer != 0 ? reinterpret_cast<const Piece*>(table.longer)
                             : reinterpret_cast<const Piece*>(table.pieces);
}

void sum_or_compare(const SumPiece* pieces, unsigned count, unsigned char* changed) {
    for (unsigned p = 0; p < count; ++p) {
        const SumPiece& piece = pieces[p];
        for (std::uint64_t begin = 0; begin < piece.numel; begin += 1024) {
            std::uint64_t sum = 0;
            for (std::uint64_t i = begin; i < std::min<std::uint64_t>(begin + 1024, piece.numel); ++i) {
                sum += piece.memory[i] * (2 * (i - begin) * (i - begin) + 1);
            }
            if (changed == nullptr) {
                piece.sums[begin / 1024] = sum;
            } else if (piece.sums[begin / 1024] != sum) {
                changed[p] = 1;
            }
        }
    }
}

}  // namespace

// Lists the kernels that csrc/cuda/kernels.cu defines.
const std::set<std::string>& kernel_names() {
    static const std::set<std::string> names = [] {
        std::set<std::string> made = {"unpack_16", "unpack_32", "sum_bits", "compare_bits"};
        for (const char* type : {"f32", "bf16", "f16"}) made.insert(std::string("pack_") + type);
        for (const char* types : {"f32_f32", "bf16_bf16", "f16_f16", "f32_bf16", "f32_f16"}) {
            for (const char* moments : {"", "_noisy", "_q8"}) made.insert(std::string("step_") + types + moments);
        }
        for (const char* types : {"f32_split", "bf16_split"}) {
            for (const char* moments : {"", "_noisy", "_q8"}) made.insert(std::string("step_") + types + moments);
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
    const unsigned count = *static_cast<unsigned*>(arguments[1]);
    if (name == "sum_bits" || name == "compare_bits") {
        auto* const changed = name == "sum_bits" ? nullptr : *static_cast<unsigned char**>(arguments[2]);
        sum_or_compare(pieces_of<SumPiece>(arguments[0]), count, changed);
        return;
    }
    const auto* const pieces = pieces_of<CopyPiece>(arguments[0]);
    auto* const buffer = *static_cast<void**>(arguments[2]);
    double* const sums = name[0] == 'p' ? *static_cast<double**>(arguments[3]) : nullptr;
    for (unsigned p = 0; p < count; ++p) run_piece(name, pieces[p], buffer, sums);
    auto* const bit_sums = name[0] == 'p' ? *static_cast<std::uint64_t**>(arguments[4]) : nullptr;
    if (bit_sums == nullptr) return;
    const unsigned words = name == "pack_f32" ? 2 : 1;  // words of 16 bits per element
    for (unsigned p = 0; p < count; ++p) {
        const SumPiece piece{reinterpret_cast<const std::uint16_t*>(pieces[p].address),
                             bit_sums + words * pieces[p].first_block, words * pieces[p].numel, 0};
        sum_or_compare(&piece, 1, nullptr);
    }
}

}  // namespace fake
