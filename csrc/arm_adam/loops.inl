// Chooses the loop over a range: vector by vector, or block by block where moments have eight bits. Part of
// algorithm.inl.
#pragma once

#include "moment_blocks.inl"
#include "vectors.inl"

namespace superoffload::adam {
namespace {

template <typename L, typename T>
SUPEROFFLOAD_INLINE void step_lanes(const Run& run, std::size_t begin, std::size_t end) {
    if constexpr (T::quantized) {
        step_moment_blocks<L, T, false>(run, {begin, end});
    } else {
        step_vectors<L, T>(run, begin, end);
    }
}

template <typename L, typename T>
SUPEROFFLOAD_INLINE void publish_lanes(const Run& run, std::size_t begin, std::size_t end) {
    if constexpr (T::quantized) {
        step_moment_blocks<L, T, true>(run, {begin, end});
    } else {
        publish_vectors<L, T>(run, begin, end);
    }
}

template <typename L, typename T, int width>
inline void journal_lanes(const Run& run, std::uint8_t* codes, std::size_t block, Range range, BlockEscapes& escapes) {
    if constexpr (T::quantized) {
        journal_moment_blocks<L, T, width>(run, codes, block, range, escapes);
    } else {
        journal_vectors<L, T, width>(run, codes, block, range, escapes);
    }
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void undo_lanes(const Run& run, std::size_t block, Range range, EscapeCursor& escapes) {
    if constexpr (T::quantized) {
        undo_moment_blocks<L, T, width>(run, block, range, escapes);
    } else {
        undo_vectors<L, T, width>(run, block, range, escapes);
    }
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void replay_lanes(const Run& run, const Scalars& scalars, std::size_t block, Range range,
                                      EscapeCursor& escapes) {
    if constexpr (T::quantized) {
        replay_moment_blocks<L, T, width>(run, scalars, block, range, escapes);
    } else {
        replay_vectors<L, T, width>(run, scalars, block, range, escapes);
    }
}

}  // namespace
}  // namespace superoffload::adam
