// Copies staged parameters to the parameters themselves, word by word. A warp takes one block at a time.
#pragma once

#include "elements.cuh"
#include "pieces.cuh"

namespace superoffload {
namespace cuda {

template <typename Word>
__device__ inline void unpack_block(const Found<CopyPiece>& block, const Word* staged, unsigned lane) {
    constexpr unsigned width = kWidth<Word>;
    constexpr unsigned packets = kBlock / width / kWarp;  // per lane
    const Word* source = staged + block.piece->offset + block.begin;
    Word* target = static_cast<Word*>(block.piece->parameter_or_gradient) + block.begin;
    if (block.numel == kBlock && is_aligned(source, 16) && is_aligned(target, 16)) {
        Packet<Word, width> loaded[packets];
#pragma unroll
        for (unsigned k = 0; k < packets; ++k) loaded[k].load(source + (k * kWarp + lane) * width);
#pragma unroll
        for (unsigned k = 0; k < packets; ++k) loaded[k].store(target + (k * kWarp + lane) * width);
        return;
    }
    for (unsigned i = lane; i < block.numel; i += kWarp) target[i] = source[i];
}

template <typename Word>
__device__ inline void unpack(const CopyPiece* pieces, unsigned count, const void* staged) {
    const unsigned lane = threadIdx.x % kWarp;
    const unsigned long long blocks = count_blocks(pieces, count);
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * kWarps;
    unsigned long long block = static_cast<unsigned long long>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    for (; block < blocks; block += stride) {
        unpack_block(find_block(pieces, count, block), static_cast<const Word*>(staged), lane);
    }
}

}  // namespace cuda
}  // namespace superoffload
