// Staged parameters into the parameters themselves. A warp takes one block at a time.
#pragma once

#include "elements.cuh"
#include "pieces.cuh"

namespace superoffload {
namespace cuda {

template <typename From, typename To>
__device__ inline void unpack_block(const Found<CopyPiece>& block, const void* staged, unsigned lane) {
    using Source = typename From::Word;
    using Target = typename To::Word;
    constexpr unsigned width = Width<From, To>::words;
    constexpr unsigned packets = kBlock / width / kWarp;  // per lane
    const Source* source = static_cast<const Source*>(staged) + block.piece->offset + block.begin;
    Target* target = static_cast<Target*>(block.piece->parameter_or_gradient) + block.begin;
    if (block.numel == kBlock && is_aligned(source, width * sizeof(Source)) &&
        is_aligned(target, width * sizeof(Target))) {
        Packet<Source, width> loaded[packets];
#pragma unroll
        for (unsigned k = 0; k < packets; ++k) loaded[k].load(source + (k * kWarp + lane) * width);
#pragma unroll
        for (unsigned k = 0; k < packets; ++k) {
            PacketConversion<From, To, width>::convert(loaded[k]).store(target + (k * kWarp + lane) * width);
        }
        return;
    }
    for (unsigned i = lane; i < block.numel; i += kWarp) target[i] = Conversion<From, To>::convert(source[i]);
}

template <typename From, typename To>
__device__ inline void unpack(const CopyPiece* pieces, unsigned count, const void* staged) {
    const unsigned lane = threadIdx.x % kWarp;
    const unsigned long long blocks = count_blocks(pieces, count);
    const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * kWarps;
    unsigned long long block = static_cast<unsigned long long>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    for (; block < blocks; block += stride) unpack_block<From, To>(find_block(pieces, count, block), staged, lane);
}

}  // namespace cuda
}  // namespace superoffload
