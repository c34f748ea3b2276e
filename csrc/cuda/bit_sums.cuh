// Detects changes of memory by one sum for every block of 2048 bytes, written or compared with the one that was written
// before. The memory is read as words of 32 bits, whatever it holds; a last block is padded with zeros.
//
// The sum is that of each word times the number of its place, modulo 2^64. These numbers are odd, so a change within
// one word always shows. No two of them are equal modulo 2^33, so exchanging two elements always shows
// (tests/kernels/test_cuda_kernels.py tries all pairs). They are mixed, so that other changes with a pattern (all
// signs, all values doubled) cancel only by chance: about one in 2^33 where only signs of fp32 change, otherwise more
// rarely.
#pragma once

#include "elements.cuh"
#include "pieces.cuh"

namespace superoffload {
namespace cuda {

using Sum = unsigned long long;

// Describes a piece in 32 bytes. As CopyPiece, with `numel` counted in elements of 16 bits, of which fp32 has two; a
// block has kBlock of them.
struct SumPiece {
    const unsigned short* memory;
    Sum* sums;  // one for each block
    unsigned long long numel;
    unsigned long long first_block;
};

__device__ inline Sum number_of(unsigned place) {
    Sum mixed = (place + 1) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9ull;
    return mixed | 1;
}

// Adds up the share of one lane of the warp.
__device__ inline Sum sum_of_lane(const Found<SumPiece>& block, unsigned lane) {
    constexpr unsigned width = kWidth<unsigned>;
    constexpr unsigned packets = kBlock / 2 / width / kWarp;
    const unsigned short* source = block.piece->memory + block.begin;
    Sum sum = 0;
    if (block.numel == kBlock && is_aligned(source, 16)) {
        Packet<unsigned, width> loaded[packets];
#pragma unroll
        for (unsigned k = 0; k < packets; ++k) {
            loaded[k].load(reinterpret_cast<const unsigned*>(source) + (k * kWarp + lane) * width);
        }
#pragma unroll
        for (unsigned k = 0; k < packets; ++k) {
#pragma unroll
            for (unsigned i = 0; i < width; ++i) {
                sum += loaded[k].get(i) * number_of((k * kWarp + lane) * width + i);
            }
        }
        return sum;
    }
    for (unsigned i = lane; i < block.numel; i += kWarp) {
        sum += (static_cast<Sum>(source[i]) << i % 2 * 16) * number_of(i / 2);
    }
    return sum;
}

// Folds the sums of `count` adjacent lanes, whose warp calls this as a whole; only lane 0 of them gets the result.
// `lanes`: a place for each of them in shared memory.
template <unsigned count>
__device__ inline Sum fold_lanes(Sum sum, Sum* lanes, unsigned lane) {
    lanes[lane] = sum;
    __syncwarp();
#pragma unroll
    for (unsigned half = count / 2; half >= 1; half /= 2) {
        if (lane < half) lanes[lane] += lanes[lane + half];
        __syncwarp();
    }
    return lanes[0];
}

// Sums or compares. `changed`: null to write sums; otherwise a byte for each piece, which becomes 1 if a sum differs.
__device__ inline void sum_or_compare(const SumPiece* pieces, unsigned count, unsigned char* changed) {
    __shared__ Sum lanes[kThreads];
    const unsigned lane = threadIdx.x % kWarp;
    Sum* const mine = lanes + threadIdx.x / kWarp * kWarp;
    const unsigned long long blocks = count_blocks(pieces, count);
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * kWarps;
    unsigned long long number = static_cast<unsigned long long>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    for (; number < blocks; number += stride) {
        const Found<SumPiece> block = find_block(pieces, count, number);
        const Sum sum = fold_lanes<kWarp>(sum_of_lane(block, lane), mine, lane);
        if (lane != 0) continue;
        Sum* const place = block.piece->sums + (number - block.piece->first_block);
        if (changed == nullptr) {
            *place = sum;
        } else if (*place != sum) {
            changed[block.piece - pieces] = 1;
        }
    }
}

}  // namespace cuda
}  // namespace superoffload
