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
SUPEROFFLOAD_NOINLINE void replay_block(const Run& run, const Scalars& scalars, Range block, EscapeCursor escapes) {
    const std::size_t middle = vector_end<L, T>(block.begin, block.end);
    replay_lanes<L, T, width>(run, scalars, block.begin, {block.begin, middle}, escapes);
    if (middle != block.end) replay_tail<TailTypes<T>, width>(run, scalars, block.begin, {middle, block.end}, escapes);
}

template <typename L, typename T, int width>
inline void journal_loops(const Run& run, std::uint8_t* codes, Range block, BlockEscapes& escapes) {
    const std::size_t middle = vector_end<L, T>(block.begin, block.end);
    std::size_t done = block.begin;
    if constexpr (L::kPairs && !T::quantized) {
        const std::size_t pair = 2 * L::width();
        while (!run.frozen.l2 && middle - done >= pair) {
            const Range pairs{done, done + (middle - done) / pair * pair};
            done = journal_pairs<L, T, width>(run, codes, block.begin, pairs, escapes);
            if (done == pairs.end) break;
            journal_lanes<L, T, width>(run, codes, block.begin, {done, done + pair}, escapes);
            done += pair;
        }
    }
    journal_lanes<L, T, width>(run, codes, block.begin, {done, middle}, escapes);
    if (middle != block.end) journal_tail<TailTypes<T>, width>(run, codes, block.begin, {middle, block.end}, escapes);
}

// Gathers a block's codes and streams them past the caches as whole lines.
template <typename L, typename T, int width>
SUPEROFFLOAD_NOINLINE void journal_block(const Run& run, Range block, BlockEscapes& escapes) {
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

// Names the loops for a run's types, chosen once for a range, so that what drives them is compiled once.
struct Loops {
    void (*step)(const Run& run, Range range);
    void (*journal)(const Run& run, Range block, BlockEscapes& escapes);
    void (*undo)(const Run& run, Range block, EscapeCursor escapes);
    void (*replay)(const Run& run, const Scalars& scalars, Range block, EscapeCursor escapes);
};

template <typename L>
Loops loops_of(const Run& run) {
    return with_types(run, [&](auto types) {
        using T = decltype(types);
        using U = UndoTypes<T>;
        if (run.journal.width == 2) {
            return Loops{step_range<L, T>, journal_block<L, T, 2>, undo_block<L, U, 2>, replay_block<L, T, 2>};
        }
        return Loops{step_range<L, T>, journal_block<L, T, 1>, undo_block<L, U, 1>, replay_block<L, T, 1>};
    });
}

template <typename L>
void undo_one(const Loops& loops, const Run& run, Range block, const JournalArena& arena) {
    JournalBlock& entry = run.journal.blocks[block.begin / kBlock];
    in_fp32<L, false>(run, block,
                      [&](const Run& its, Range part) { loops.undo(its, part, EscapeCursor(entry, arena)); });
    entry.offset = JournalBlock::kNotApplied;
}

// Gives the escapes of the range's blocks their place in the arena. If it has no room, restores the blocks.
template <typename L>
SUPEROFFLOAD_NOINLINE bool commit_or_undo(const Loops& loops, const Run& run, Range range, WaitingEscapes& waiting) {
    JournalBlock* const first = run.journal.blocks + range.begin / kBlock;
    JournalBlock* const last = run.journal.blocks + (range.end + kBlock - 1) / kBlock;
    if (waiting.commit(*run.journal.arena, first, last)) return true;
    const JournalArena arena = waiting.as_arena();
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        undo_one<L>(loops, run, block_at(begin, range.end), arena);
    }
    return false;
}

template <typename L>
bool journal_range(const Run& run, Range range) {
    const Loops loops = loops_of<L>(run);
    BlockEscapes escapes;
    WaitingEscapes waiting;
    PlacedRun<L> placed(run);
    Range uncommitted{range.begin, range.begin};
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        if (!waiting.has_room()) {
            if (!commit_or_undo<L>(loops, run, uncommitted, waiting)) return false;
            uncommitted.begin = begin;
        }
        const Range block = block_at(begin, range.end);
        in_fp32<L>(placed.at(block), block, [&](const Run& its, Range part) { loops.journal(its, part, escapes); });
        JournalBlock& entry = run.journal.blocks[begin / kBlock];
        waiting.add(escapes, entry);
        // Where one- and two-byte codes have the same bits, a wide escape is a narrow one too.
        entry.narrow_escapes = static_cast<std::uint16_t>(
            run.journal.width == 1 ? escapes.total() : escapes.narrow + escapes.component[2].count);
        uncommitted.end = block.end;
    }
    return commit_or_undo<L>(loops, run, uncommitted, waiting);
}

// Makes streamed shadows visible to the thread that learns that the range is done.
template <typename L>
SUPEROFFLOAD_INLINE void finish_stores(const Run& run) {
    if (run.past_cache) L::fence();
}

template <typename L>
void step_all(const Run& run, Range range) {
    const Loops loops = loops_of<L>(run);
    for_each_placed<L>(run, range, presents_fp16(run),
                       [&](const Run& placed, Range part) { in_fp32<L>(placed, part, loops.step); });
    finish_stores<L>(run);
}

template <typename L>
void publish_all(const Run& run, Range range) {
    for_each_placed<L>(run, range, presents_fp16(run), [](const Run& placed, Range part) {
        in_fp32<L>(placed, part, [](const Run& its, Range all) {
            with_types(its, [&](auto types) { publish_range<L, decltype(types)>(its, all); });
        });
    });
    finish_stores<L>(run);
}

template <typename L>
bool step_journaled_all(const Run& run, Range range) {
    const bool fits = journal_range<L>(run, range);
    finish_stores<L>(run);
    return fits;
}

// Undoes every block of the range whose journal has not been used yet.
template <typename L>
void undo_all(const Run& run, Range range) {
    const Loops loops = loops_of<L>(run);
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        if (run.journal.blocks[begin / kBlock].offset == JournalBlock::kNotApplied) continue;
        undo_one<L>(loops, run, block_at(begin, range.end), *run.journal.arena);
    }
}

// Replays a range; steps a block whose journal was used already as it is.
template <typename L>
void replay_all(const Run& run, Range range, const Scalars& scalars) {
    const Loops loops = loops_of<L>(run);
    PlacedRun<L> placed(run);
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        const Range block = block_at(begin, range.end);
        JournalBlock& entry = run.journal.blocks[begin / kBlock];
        if (entry.offset == JournalBlock::kNotApplied) {
            Run again = placed.at(block);
            again.frozen = scalars;
            in_fp32<L>(again, block, loops.step);
        } else {
            in_fp32<L>(placed.at(block), block, [&](const Run& its, Range part) {
                loops.replay(its, scalars, part, EscapeCursor(entry, *run.journal.arena));
            });
            entry.offset = JournalBlock::kNotApplied;
        }
    }
    finish_stores<L>(run);
}

template <typename L>
constexpr Kernels kernels_of(const char* name) {
    return {name, step_all<L>, step_journaled_all<L>, undo_all<L>, replay_all<L>, publish_all<L>, pack_all<L>};
}

}  // namespace
}  // namespace superoffload::adam
