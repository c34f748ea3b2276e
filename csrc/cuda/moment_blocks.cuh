// Steps parameters with 8-bit moments, whose blocks of 256 elements have a scale each. It is known only when all of a
// block's new moments are: a warp takes a block and keeps these in registers until then.
#pragma once

#include "elements.cuh"
#include "moment_codes.cuh"
#include "pieces.cuh"
#include "step.cuh"

namespace superoffload {
namespace cuda {

static_assert(kBlock == kWarps * kMomentBlock, "the warps share a block of kBlock elements");

// Locates the block of a warp.
struct MomentBlock {
    const StepPiece& piece;
    unsigned long long begin;  // in elements of the piece
    unsigned numel;

    __device__ unsigned char* codes(void* of_piece) const { return static_cast<unsigned char*>(of_piece) + begin; }
    __device__ unsigned char& exp_avg_scale() const { return piece.exp_avg_scales[begin / kMomentBlock]; }
    __device__ unsigned char& exp_avg_sq_scale() const { return piece.exp_avg_sq_scales[begin / kMomentBlock]; }
};

// Holds a lane's part of a block, or some of it: `width` elements at once, `repeats` times, from place `at` on.
template <typename Gradient, typename Published, typename Masters, unsigned width, unsigned repeats>
struct LaneOfBlock {
    static constexpr unsigned apart = kWarp * width;
    using Codes = Packet<unsigned char, width>;

    Masters p[repeats];
    float m[repeats][width];
    float v[repeats][width];

    // Computes the new moments, not yet rounded: all loads before the first use. `first`, `second`: of the old ones.
    __device__ void compute(const MomentBlock& block, unsigned at, const Grid<FirstCodes>& first,
                            const Grid<SecondCodes>& second) {
        const StepPiece& piece = block.piece;
        const typename Masters::Place master(piece, block.begin);
        const auto* const gradient = static_cast<const typename Gradient::Word*>(piece.gradient) + block.begin;
        Codes code_m[repeats], code_v[repeats];
        Packet<typename Gradient::Word, width> g[repeats];
#pragma unroll
        for (unsigned k = 0; k < repeats; ++k) {
            p[k].load(master, at + k * apart);
            code_m[k].load(block.codes(piece.exp_avg) + at + k * apart);
            code_v[k].load(block.codes(piece.exp_avg_sq) + at + k * apart);
            g[k].load(gradient + at + k * apart);
        }
#pragma unroll
        for (unsigned k = 0; k < repeats; ++k) {
#pragma unroll
            for (unsigned w = 0; w < width; ++w) {
                m[k][w] = first.value(code_m[k].get(w));
                v[k][w] = second.value(code_v[k].get(w));
                next_moments(piece.scalars, Gradient::value(g[k].get(w)), __uint_as_float(p[k].get(w)), m[k][w],
                             v[k][w]);
            }
        }
    }

    // Returns the largest bits of magnitudes, or `found` where that is larger. A NaN of either sign is above numbers.
    __device__ static unsigned largest(const float (&moments)[repeats][width], unsigned found) {
#pragma unroll
        for (unsigned k = 0; k < repeats; ++k) {
#pragma unroll
            for (unsigned w = 0; w < width; ++w) {
                const unsigned bits = __float_as_uint(moments[k][w]) & kMagnitude;
                found = found > bits ? found : bits;
            }
        }
        return found;
    }

    // Rounds the moments under the new scales, steps the masters, and stores them all.
    __device__ void finish(const MomentBlock& block, unsigned at, const Grid<FirstCodes>& first,
                           const Grid<SecondCodes>& second) {
        const StepPiece& piece = block.piece;
        const typename Masters::Place master(piece, block.begin);
        auto* const parameter = static_cast<typename Published::Word*>(piece.parameter) + block.begin;
#pragma unroll
        for (unsigned k = 0; k < repeats; ++k) {
            Masters next_p;
            Codes next_m{}, next_v{};
            Packet<typename Published::Word, width> published;
#pragma unroll
            for (unsigned w = 0; w < width; ++w) {
                const unsigned place = place_of(piece, block.begin + at + k * apart + w);
                const unsigned random = noise(piece.scalars.noise_key, place);
                next_m.set(w, static_cast<unsigned char>(first.round(m[k][w], random & 0xffffu)));
                next_v.set(w, static_cast<unsigned char>(second.round(v[k][w], random >> 16)));
                float next = __uint_as_float(p[k].get(w));
                step_master(piece.scalars, next, m[k][w], v[k][w]);
                next_p.set(w, next);
                published.set(w, Masters::template published<Published>(next));
            }
            next_p.store(master, at + k * apart);
            next_m.store(block.codes(piece.exp_avg) + at + k * apart);
            next_v.store(block.codes(piece.exp_avg_sq) + at + k * apart);
            published.store(parameter + at + k * apart);
        }
    }
};

// Steps a block whose lanes take `width * repeats` elements at a time. Where that is not all of it, new moments are
// computed twice, for the scales and for their codes, since an array of changing length would not be in registers.
template <typename Gradient, typename Published, typename Masters, unsigned width, unsigned repeats>
__device__ inline void step_moment_block(const MomentBlock& block) {
    constexpr unsigned at_once = kWarp * width * repeats;
    const unsigned start = threadIdx.x % kWarp * width;
    const Grid<FirstCodes> old_first(block.exp_avg_scale());
    const Grid<SecondCodes> old_second(block.exp_avg_sq_scale());
    LaneOfBlock<Gradient, Published, Masters, width, repeats> lane;
    unsigned largest_m = 0;
    unsigned largest_v = 0;
#pragma unroll 1
    for (unsigned at = start; at < block.numel; at += at_once) {
        lane.compute(block, at, old_first, old_second);
        largest_m = lane.largest(lane.m, largest_m);
        largest_v = lane.largest(lane.v, largest_v);
    }
    const unsigned scale_m = scale_of<FirstCodes>(largest_of_warp(largest_m));
    const unsigned scale_v = scale_of<SecondCodes>(largest_of_warp(largest_v));
    if (start == 0) {  // the old ones have been read: every lane's part of the largest depends on them
        block.exp_avg_scale() = static_cast<unsigned char>(scale_m);
        block.exp_avg_sq_scale() = static_cast<unsigned char>(scale_v);
    }
    const Grid<FirstCodes> first(scale_m);
    const Grid<SecondCodes> second(scale_v);
#pragma unroll 1
    for (unsigned at = start; at < block.numel; at += at_once) {
        if constexpr (at_once < kMomentBlock) lane.compute(block, at, old_first, old_second);
        lane.finish(block, at, first, second);
    }
}

template <typename Gradient, typename Published, template <unsigned> class Masters>
__device__ inline void step_moment_blocks(const StepPiece* pieces, unsigned count) {
    constexpr unsigned width = 4;
    constexpr unsigned repeats = kMomentBlock / kWarp / width;
    const unsigned long long blocks = count_blocks(pieces, count);
    for (unsigned long long number = blockIdx.x; number < blocks; number += gridDim.x) {
        const Found<StepPiece> found = find_block(pieces, count, number);
        const unsigned at = threadIdx.x / kWarp * kMomentBlock;
        if (at >= found.numel) continue;  // the whole warp
        const StepPiece piece = *found.piece;
        const unsigned rest = found.numel - at;
        const unsigned long long begin = found.begin + at;
        if (rest >= kMomentBlock && Masters<width>::is_aligned(piece) && is_aligned(piece.exp_avg, width) &&
            is_aligned(piece.exp_avg_sq, width) &&
            is_aligned(piece.gradient, width * sizeof(typename Gradient::Word)) &&
            is_aligned(piece.parameter, width * sizeof(typename Published::Word))) {
            step_moment_block<Gradient, Published, Masters<width>, width, repeats>({piece, begin, kMomentBlock});
        } else {
            const unsigned numel = rest < kMomentBlock ? rest : kMomentBlock;
            step_moment_block<Gradient, Published, Masters<1>, 1, 1>({piece, begin, numel});
        }
    }
}

}  // namespace cuda
}  // namespace superoffload
