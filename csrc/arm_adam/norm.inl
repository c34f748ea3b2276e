// Sums squares over fixed blocks, in fp64 and in one order for all instruction sets; packing copies in the same pass.
// Part of algorithm.inl.
#pragma once

#include <cstring>

#include "arithmetic.inl"
#include "kernels.h"
#include "lanes_scalar.h"

namespace superoffload::adam {
namespace {

template <typename L, ElementType type>
inline double sum_block(const void* gradient, std::size_t begin, std::size_t end) {
    typename L::Sums sums{};
    const std::size_t middle = begin + (end - begin) / 16 * 16;
    for (std::size_t i = begin; i < middle; i += 16) {
        if constexpr (type == ElementType::f32) L::sum16_f32(sums, static_cast<const float*>(gradient) + i);
        if constexpr (type == ElementType::bf16) L::sum16_bf16(sums, static_cast<const std::uint16_t*>(gradient) + i);
        if constexpr (type == ElementType::f16) L::sum16_f16(sums, static_cast<const std::uint16_t*>(gradient) + i);
    }
    double s[16];
    L::store_sums(sums, s);
    for (std::size_t i = middle; i < end; ++i) {
        const double x = load_element<ScalarLanes, type>(gradient, i);
        s[i - middle] += x * x;
    }
    for (int half = 8; half >= 1; half /= 2) {
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    }
    // A sum of squares of finite fp32 values cannot overflow fp64, so this is the test for a non-finite element.
    return s[0] - s[0] == 0 ? s[0] : __builtin_inf();
}

template <typename L>
void pack_all(const void* gradient, void* packed, ElementType type, std::size_t numel, double* block_sums) {
    const std::size_t size = element_size(type);
    for (std::size_t begin = 0; begin < numel; begin += kBlock) {
        const std::size_t end = begin + kBlock < numel ? begin + kBlock : numel;
        double& sum = block_sums[begin / kBlock];
        switch (type) {
            case ElementType::bf16:
                sum = sum_block<L, ElementType::bf16>(gradient, begin, end);
                break;
            case ElementType::f16:
                sum = sum_block<L, ElementType::f16>(gradient, begin, end);
                break;
            default:
                sum = sum_block<L, ElementType::f32>(gradient, begin, end);
        }
        if (packed != nullptr) {
            std::memcpy(static_cast<char*>(packed) + begin * size, static_cast<const char*>(gradient) + begin * size,
                        (end - begin) * size);
        }
    }
}

}  // namespace
}  // namespace superoffload::adam
