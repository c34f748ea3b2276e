// Finds the elements that a CUDA block works on. All kernels take a list of pieces: runs of consecutive elements, cut
// into numbered blocks of kBlock elements. Pieces are sorted by their first block; empty ones are allowed.
//
// Launch geometry: kThreads threads per CUDA block, and any grid: kernels stride over the blocks.
#pragma once

namespace superoffload {
namespace cuda {

constexpr unsigned kBlock = 1024;  // as in csrc/arm_adam/adam.h
constexpr unsigned kThreads = 128;
constexpr unsigned kWarp = 32;
constexpr unsigned kWarps = kThreads / kWarp;

// Describes a piece in 32 bytes. `offset` counts elements in the packed gradient or the staged parameters.
struct CopyPiece {
    void* parameter_or_gradient;
    unsigned long long offset;
    unsigned long long numel;
    unsigned long long first_block;
};

// Lists pieces as an argument of a launch, since a copy to the device can queue behind a long upload of parameters. A
// launch has room for 4 KB of arguments; a list that is longer lies in device memory.
constexpr unsigned kTableBytes = 4000;  // as in streams.h

template <typename Piece>
struct Table {
    const Piece* longer;  // null: the list is `pieces`
    Piece pieces[kTableBytes / sizeof(Piece)];

    __device__ const Piece* list() const { return longer != nullptr ? longer : pieces; }
};

// Saves threads a copy of the argument each; devices before Volta cannot do without.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define SUPEROFFLOAD_TABLE(Piece) const superoffload::cuda::Table<superoffload::cuda::Piece>
#else
#define SUPEROFFLOAD_TABLE(Piece) const __grid_constant__ superoffload::cuda::Table<superoffload::cuda::Piece>
#endif

template <typename Piece>
struct Found {
    const Piece* piece;
    unsigned long long begin;  // in elements of the piece
    unsigned numel;
};

template <typename Piece>
__device__ inline unsigned long long count_blocks(const Piece* pieces, unsigned count) {
    if (count == 0) return 0;
    const Piece& last = pieces[count - 1];
    return last.first_block + (last.numel + kBlock - 1) / kBlock;
}

template <typename Piece>
__device__ inline Found<Piece> find_block(const Piece* pieces, unsigned count, unsigned long long block) {
    unsigned low = 0;
    unsigned high = count;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (pieces[middle].first_block <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const Piece* piece = pieces + low;
    const unsigned long long begin = (block - piece->first_block) * kBlock;
    const unsigned long long rest = piece->numel - begin;
    return {piece, begin, rest < kBlock ? static_cast<unsigned>(rest) : kBlock};
}

}  // namespace cuda
}  // namespace superoffload
