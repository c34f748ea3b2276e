// Implements the entries of kernels.h: cuts ranges into blocks, whole vectors and tails. Each isa_*.cpp includes this
// file and instantiates it with its lane type (see arithmetic.inl). Everything lives in an unnamed namespace, so that
// code compiled for one instruction set is never linked into another.
#pragma once

#include <cstdint>

#include "arithmetic.inl"
#include "journal.inl"
#include "kernels.h"
#include "loops.inl"
#include "norm.inl"
#include "places.inl"
#include "tail.inl"
#include "types.inl"

namespace superoffload::adam {
namespace {

// Returns where the whole vectors end, or the whole blocks of 8-bit moments; the scalar lanes do the rest of a range.
template <typename L, typename T>
SUPEROFFLOAD_INLINE std::size_t vector_end(std::size_t begin, std::size_t end) {
    const std::size_t unit = T::quantized ? kMomentBlock : L::width();
    return begin + (end - begin) / unit * unit;
}

template <typename L, typename T>
SUPEROFFLOAD_NOINLINE void step_range(const Run& run, Range range) {
    const std::size_t middle = vector_end<L, T>(range.begin, range.end);
    step_lanes<L, T>(run, range.begin, middle);
    if (middle != range.end) step_tail<TailTypes<T>>(run, {middle, range.end});
}

template <typename L, typename T>
inline void publish_range(const Run& run, Range range) {
    const std::size_t middle = vector_end<L, T>(range.begin, range.end);
    publish_lanes<L, T>(run, range.begin, middle);
    if (middle != range.end) publish_tail<TailTypes<T>>(run, {middle, range.end});
}

template <typename L, typename T, int width>
SUPEROFFLOAD_NOINLINE void undo_block(const Run& run, Range block, EscapeCursor escapes) {
    const std::size_t middle = vector_end<L, T>(block.begin, block.end);
    undo_lanes<L, T, width>(run, block.begin, {block.begin, middle}, escapes);
    if (middle != block.end) undo_tail<TailTypes<T>, width>(run, block.begin, {middle, block.end}, escapes);
}

template <typename L, typename T, int width>
inline void replay_block(const Run& run, const Scalars& scalars, Range block, EscapeCursor escapes) {
    const std::size_t middle = vector_end<L, T>(block.begin, block.end);
    replay_lanes<L, T, width>(run, scalars, block.begin, {block.begin, middle}, escapes);
    if (middle != block.end) replay_tail<TailTypes<T>, width>(run, scalars, block.begin, {middle, block.end}, escapes);
}

template <typename L, typename T, int width>
SUPEROFFLOAD_NOINLINE void journal_loops(const Run& run, std::uint8_t* codes, Range block, BlockEscapes& escapes) {
    const std::size_t middle = vector_end<L, T>(block.begin, block.end);
    std::size_t done = block.begin;
    if constexpr (L::kPairs && !T::quantized) {
        const std::size_t pairs = (block.end - block.begin) / (2 * L::width());
        done += pairs * 2 * L::width();
        journal_pairs<L, T, width>(run, codes, block.begin, {block.begin, done}, escapes);
    }
    journal_lanes<L, T, width>(run, codes, block.begin, {done, middle}, escapes);
    if (middle != block.end) journal_tail<TailTypes<T>, width>(run, codes, block.begin, {middle, block.end}, escapes);
}

// Gathers a block's codes and streams them past the caches as whole lines.
template <typename L, typename T, int width>
inline void journal_block(const Run& run, Range block, BlockEscapes& escapes) {
    std::uint8_t* codes = run.journal.codes + width * block.begin;
    escapes.clear();
    if constexpr (L::kPairsFillLines) {
        if (run.past_cache && is_aligned(codes) && block.end - block.begin == kBlock) {
            alignas(kLine) std::uint8_t gathered[width * kBlock];
            journal_loops<L, T, width>(run, gathered, block, escapes);
            for (std::size_t i = 0; i < sizeof gathered; i += kLine) L::stream_line(codes + i, gathered + i);
            return;
        }
    }
    journal_loops<L, T, width>(run, codes, block, escapes);
}

// Gives the escapes of the range's blocks their place in the arena. If it has no room, restores the blocks.
template <typename L, typename T, int width>
SUPEROFFLOAD_NOINLINE bool commit_or_undo(const Run& run, Range range, WaitingEscapes& waiting) {
    JournalBlock* const first = run.journal.blocks + range.begin / kBlock;
    JournalBlock* const last = run.journal.blocks + (range.end + kBlock - 1) / kBlock;
    if (waiting.commit(*run.journal.arena, first, last)) return true;
    const JournalArena arena = waiting.as_arena();
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        JournalBlock& entry = run.journal.blocks[begin / kBlock];
        undo_block<L, T, width>(run, block_at(begin, range.end), EscapeCursor(entry, arena));
        entry.offset = JournalBlock::kNotApplied;
    }
    return false;
}

template <typename L, typename T, int width>
bool journal_range(const Run& run, Range range) {
    BlockEscapes escapes;
    WaitingEscapes waiting;
    PlacedRun<L> placed(run);
    Range uncommitted{range.begin, range.begin};
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        if (!waiting.has_room()) {
            if (!commit_or_undo<L, UndoTypes<T>, width>(run, uncommitted, waiting)) return false;
            uncommitted.begin = begin;
        }
        const Range block = block_at(begin, range.end);
        journal_block<L, T, width>(placed.at(block), block, escapes);
        JournalBlock& entry = run.journal.blocks[begin / kBlock];
        waiting.add(escapes, entry);
        // Where one- and two-byte codes have the same bits, a wide escape is a narrow one too.
        entry.narrow_escapes =
            static_cast<std::uint16_t>(width == 1 ? escapes.total() : escapes.narrow + escapes.component[2].count);
        uncommitted.end = block.end;
    }
    return commit_or_undo<L, UndoTypes<T>, width>(run, uncommitted, waiting);
}

// Makes streamed shadows visible to the thread that learns that the range is done.
template <typename L>
SUPEROFFLOAD_INLINE void finish_stores(const Run& run) {
    if (run.past_cache) L::fence();
}

template <typename L>
void step_all(const Run& run, Range range) {
    for_each_placed<L>(run, range, [](const Run& placed, Range part) {
        with_types(placed, [&](auto types) { step_range<L, decltype(types)>(placed, part); });
    });
    finish_stores<L>(run);
}

template <typename L>
void publish_all(const Run& run, Range range) {
    for_each_placed<L>(run, range, [](const Run& placed, Range part) {
        with_types(placed, [&](auto types) { publish_range<L, decltype(types)>(placed, part); });
    });
    finish_stores<L>(run);
}

template <typename L>
bool step_journaled_all(const Run& run, Range range) {
    const bool fits = with_types(run, [&](auto types) {
        return run.journal.width == 1 ? journal_range<L, decltype(types), 1>(run, range)
                                      : journal_range<L, decltype(types), 2>(run, range);
    });
    finish_stores<L>(run);
    return fits;
}

// Undoes every block of the range whose journal has not been used yet.
template <typename L, typename T, int width>
void undo_range(const Run& run, Range range) {
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        JournalBlock& entry = run.journal.blocks[begin / kBlock];
        if (entry.offset == JournalBlock::kNotApplied) continue;
        undo_block<L, T, width>(run, block_at(begin, range.end), EscapeCursor(entry, *run.journal.arena));
        entry.offset = JournalBlock::kNotApplied;
    }
}

template <typename L>
void undo_all(const Run& run, Range range) {
    with_undo_types(run, [&](auto types) {
        using T = decltype(types);
        run.journal.width == 1 ? undo_range<L, T, 1>(run, range) : undo_range<L, T, 2>(run, range);
    });
}

// Replays a range; steps a block whose journal was used already as it is.
template <typename L, typename T, int width>
void replay_range(const Run& run, const Scalars& scalars, Range range) {
    PlacedRun<L> placed(run);
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        const Range block = block_at(begin, range.end);
        JournalBlock& entry = run.journal.blocks[begin / kBlock];
        if (entry.offset == JournalBlock::kNotApplied) {
            Run again = placed.at(block);
            again.frozen = scalars;
            step_range<L, T>(again, block);
        } else {
            replay_block<L, T, width>(placed.at(block), scalars, block, EscapeCursor(entry, *run.journal.arena));
            entry.offset = JournalBlock::kNotApplied;
        }
    }
}

template <typename L>
void replay_all(const Run& run, Range range, const Scalars& scalars) {
    with_types(run, [&](auto types) {
        using T = decltype(types);
        run.journal.width == 1 ? replay_range<L, T, 1>(run, scalars, range)
                               : replay_range<L, T, 2>(run, scalars, range);
    });
    finish_stores<L>(run);
}

template <typename L>
constexpr Kernels kernels_of(const char* name) {
    return {name, step_all<L>, step_journaled_all<L>, undo_all<L>, replay_all<L>, publish_all<L>, pack_all<L>};
}

}  // namespace
}  // namespace superoffload::adam
