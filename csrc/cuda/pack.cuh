// Packs gradients and sums the squares of every block, to the very bits of csrc/arm_adam/norm.inl, where element i of a
// block goes to running sum i % 16 and the sums are folded by halves.
//
// A warp takes two blocks at a time and stages both in shared memory, so that global accesses are dense; then each lane
// adds up one column of 64 elements, in order. The products are exact in fp64, so a fused multiply-add rounds just as
// the processor's multiplication and addition do. A short block is padded with zeros, which change no sum.
#pragma once

#include "elements.cuh"
#include "pieces.cuh"

namespace superoffload {
namespace cuda {

constexpr unsigned kSums = 16;
constexpr unsigned kBlocksPerWarp = kWarp / kSums;
constexpr unsigned kBlocksPerGroup = kWarps * kBlocksPerWarp;  // blocks that a CUDA block takes at a time
constexpr unsigned kStride = kBlock + kSums;                   // no bank meets both columns of a warp

template <typename Word>
__device__ inline void stage_block(const Found<CopyPiece>& block, Word* packed, Word* stage, unsigned lane) {
    constexpr unsigned width = kWidth<Word>;
    constexpr unsigned packets = kBlock / width / kWarp;  // per lane
    const Word* source = static_cast<const Word*>(block.piece->parameter_or_gradient) + block.begin;
    Word* target = packed + block.piece->offset + block.begin;
    if (block.numel == kBlock && is_aligned(source, 16) && is_aligned(target, 16)) {
        Packet<Word, width> loaded[packets];
#pragma unroll
        for (unsigned k = 0; k < packets; ++k) loaded[k].load(source + (k * kWarp + lane) * width);
#pragma unroll
        for (unsigned k = 0; k < packets; ++k) {
            const unsigned i = (k * kWarp + lane) * width;
            loaded[k].stage(stage + i);
            loaded[k].store(target + i);
        }
        return;
    }
    for (unsigned i = lane; i < kBlock; i += kWarp) {
        const bool exists = i < block.numel;
        const Word word = exists ? source[i] : static_cast<Word>(0);
        stage[i] = word;
        if (exists) target[i] = word;
    }
}

template <typename Format>
__device__ inline double sum_column(const typename Format::Word* column) {
    double sum = 0;
#pragma unroll 8
    for (unsigned row = 0; row < kBlock / kSums; ++row) {
        const double x = Format::value(column[row * kSums]);
        sum = __fma_rn(x, x, sum);
    }
    return sum;
}

template <unsigned half>
__device__ inline void fold_halves(double* sums) {
    if constexpr (half >= 1) {
#pragma unroll
        for (unsigned i = 0; i < half; ++i) sums[i] = __dadd_rn(sums[i], sums[i + half]);
        fold_halves<half / 2>(sums);
    }
}

// Folds the sums; +inf if an element is not finite: squares of finite fp32 values cannot overflow an fp64 sum.
__device__ inline double fold_columns(const double* columns) {
    double sums[kSums];
#pragma unroll
    for (unsigned i = 0; i < kSums; ++i) sums[i] = columns[i];
    fold_halves<kSums / 2>(sums);
    return __dadd_rn(sums[0], -sums[0]) == 0 ? sums[0] : __longlong_as_double(0x7ff0000000000000ll);
}

// Sums the bits of a column, as far as they belong to the `part`-th of the block's sums.
template <typename Word>
__device__ inline Sum sum_bits_of_column(const Word* stage, unsigned column, unsigned part) {
    constexpr unsigned per_word = 4 / sizeof(Word);
    constexpr unsigned elements = kBlock / 2 * per_word;  // elements of one sum
    Sum sum = 0;
#pragma unroll 8
    for (unsigned i = column; i < elements; i += kSums) {
        sum += (static_cast<Sum>(stage[part * elements + i]) << i % per_word * 16) * number_of(i / per_word);
    }
    return sum;
}

template <typename Format>
__device__ inline void pack(const CopyPiece* pieces, unsigned count, void* packed, double* sums, Sum* bit_sums) {
    using Word = typename Format::Word;
    __shared__ uint4 staged[kBlocksPerGroup * kStride * sizeof(Word) / sizeof(uint4)];
    __shared__ double columns[kThreads];
    __shared__ Sum bits[kThreads];
    constexpr unsigned parts = sizeof(Word) / 2;  // sums of bits per block
    const unsigned warp = threadIdx.x / kWarp;
    const unsigned lane = threadIdx.x % kWarp;
    const unsigned mine = lane / kSums;  // which of the warp's blocks this lane adds up
    const unsigned column = lane % kSums;
    Word* stage = reinterpret_cast<Word*>(staged) + warp * kBlocksPerWarp * kStride;
    const unsigned long long blocks = count_blocks(pieces, count);
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * kBlocksPerGroup;
    unsigned long long first = static_cast<unsigned long long>(blockIdx.x) * kBlocksPerGroup + warp * kBlocksPerWarp;
    for (; first < blocks; first += stride) {
#pragma unroll
        for (unsigned k = 0; k < kBlocksPerWarp; ++k) {
            if (first + k < blocks) {
                stage_block(find_block(pieces, count, first + k), static_cast<Word*>(packed), stage + k * kStride,
                            lane);
            }
        }
        __syncwarp();
        if (first + mine < blocks) columns[threadIdx.x] = sum_column<Format>(stage + mine * kStride + column);
        __syncwarp();
        if (column == 0 && first + mine < blocks) sums[first + mine] = fold_columns(columns + threadIdx.x);
        if (bit_sums == nullptr) continue;
#pragma unroll
        for (unsigned part = 0; part < parts; ++part) {
            // Without a second block, the sum of the staged words is not used.
            const Sum sum = fold_lanes<kSums>(sum_bits_of_column(stage + mine * kStride, column, part),
                                              bits + threadIdx.x - column, column);
            if (column == 0 && first + mine < blocks) bit_sums[parts * (first + mine) + part] = sum;
        }
    }
}

}  // namespace cuda
}  // namespace superoffload
