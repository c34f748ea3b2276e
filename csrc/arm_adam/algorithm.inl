// The algorithm, once: loops over the elements of a run, and the choice of types. Each isa_*.cpp includes this file and
// instantiates it with its lane type (see arithmetic.inl); everything lives in an unnamed namespace, so that code
// compiled for one instruction set is never linked into another.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "arithmetic.inl"
#include "journal.inl"
#include "kernels.h"
#include "lanes_scalar.h"
#include "norm.inl"

namespace superoffload::adam {
namespace {

template <typename F>
inline auto with_element_type(ElementType type, F f) {
    using std::integral_constant;
    switch (type) {
        case ElementType::bf16:
            return f(integral_constant<ElementType, ElementType::bf16>{});
        case ElementType::f16:
            return f(integral_constant<ElementType, ElementType::f16>{});
        default:
            return f(integral_constant<ElementType, ElementType::f32>{});
    }
}

// The types of a run as compile-time constants.
template <ElementType gradient_type, ElementType shadow_type, ElementType state_type, bool is_l2>
struct Types {
    static constexpr ElementType gradient = gradient_type;
    static constexpr ElementType shadow = shadow_type;  // undo does not write it, and ignores this
    static constexpr ElementType state = state_type;    // of the moments
    static constexpr bool l2 = is_l2;
};

// Asks for the state and gradient that a loop will need soon: the processor's own prefetchers stop at page borders, and
// its window is too short to hide memory behind a square root and a division. May point past the end; nothing is read.
template <typename L, typename T, std::size_t elements = L::kPrefetchAhead>
SUPEROFFLOAD_INLINE void prefetch(const Run& run, std::size_t i) {
    if constexpr (elements != 0) {
        const auto ahead = [i](const void* array, std::size_t size) {
            const auto address = reinterpret_cast<std::uintptr_t>(array) + (i + elements) * size;
            __builtin_prefetch(reinterpret_cast<const void*>(address));
        };
        ahead(run.master, sizeof(float));
        ahead(run.exp_avg, element_size(T::state));
        ahead(run.exp_avg_sq, element_size(T::state));
        ahead(run.gradient, element_size(T::gradient));
    }
}

// Stores past the caches go to aligned addresses only. Ranges start at whole blocks, so the array's start decides.
constexpr std::size_t kLine = 64;
SUPEROFFLOAD_INLINE bool is_aligned(const void* array) { return reinterpret_cast<std::uintptr_t>(array) % kLine == 0; }
SUPEROFFLOAD_INLINE bool stores_past_cache(const Run& run) { return run.past_cache && is_aligned(run.shadow); }

// The step of one vector, in place: canonical values, as they are stored.
template <typename L, typename T>
SUPEROFFLOAD_INLINE void step_vector(const Scalars& s, std::uint32_t index, typename L::F gradient, typename L::F& p,
                                     typename L::F& m, typename L::F& v) {
    const auto g = effective_gradient<L, T::l2>(s, gradient, p);
    next_moments<L, T::state>(s, m, v, g, second_increment<L>(s, g), index);
    p = next_master<L, T::l2>(s, p, direction<L>(s, m, v));
    make_canonical<L>(m, v, p);
}

// Every loop works on a copy of the run that no store can alias, so that its fields stay in registers.

template <typename L, typename T>
SUPEROFFLOAD_INLINE void step_lanes(const Run& shared, std::size_t begin, std::size_t end) {
    const Run run = shared;
    const bool past_cache = stores_past_cache(run);
    for (std::size_t i = begin; i < end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto p = L::load(run.master + i);
        auto m = load_element<L, T::state>(run.exp_avg, i);
        auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        step_vector<L, T>(run.frozen, run.index_of(i), load_element<L, T::gradient>(run.gradient, i), p, m, v);
        store_element<L, T::state>(run.exp_avg, i, m);
        store_element<L, T::state>(run.exp_avg_sq, i, v);
        L::store(run.master + i, p);
        if (run.shadow != nullptr) store_shadow<L, T::shadow>(run.shadow, i, p, past_cache);
    }
}

template <typename L, typename T>
SUPEROFFLOAD_INLINE void publish_lanes(const Run& shared, std::size_t begin, std::size_t end) {
    const Run run = shared;
    const bool past_cache = stores_past_cache(run);
    for (std::size_t i = begin; i < end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto p = L::load(run.master + i);
        auto m = load_element<L, T::state>(run.exp_avg, i);
        auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        step_vector<L, T>(run.frozen, run.index_of(i), load_element<L, T::gradient>(run.gradient, i), p, m, v);
        store_shadow<L, T::shadow>(run.shadow, i, p, past_cache);
    }
}

// Stores nothing past the caches: a vector's shadow is half a line, and it takes so long until the other half follows
// that both are written out by themselves. `codes`: of the block.
template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void journal_lanes(const Run& shared, std::uint8_t* codes, std::size_t block, Range range,
                                       BlockEscapes& escapes) {
    const Run run = shared;
    const Scalars& s = run.frozen;
    for (std::size_t i = range.begin; i < range.end; i += L::width()) {
        prefetch<L, T>(run, i);
        const auto p = L::load(run.master + i);
        const auto m = load_element<L, T::state>(run.exp_avg, i);
        const auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        const auto g = effective_gradient<L, T::l2>(s, load_element<L, T::gradient>(run.gradient, i), p);
        const auto second = second_increment<L>(s, g);
        auto next_m = m;
        auto next_v = v;
        next_moments<L, T::state>(s, next_m, next_v, g, second, run.index_of(i));
        const auto q = direction<L>(s, next_m, next_v);
        auto next_p = next_master<L, T::l2>(s, p, q);
        make_canonical<L>(next_m, next_v, next_p);
        store_element<L, T::state>(run.exp_avg, i, next_m);
        store_element<L, T::state>(run.exp_avg_sq, i, next_v);
        L::store(run.master + i, next_p);
        store_shadow<L, T::shadow>(run.shadow, i, next_p, false);
        const auto est_m = estimated_word<L, T::state>(estimate_exp_avg<L>(s, next_m, first_increment<L>(s, g)));
        const auto est_v = estimated_word<L, T::state>(estimate_exp_avg_sq<L>(s, next_v, second));
        const auto est_p = estimated_word<L, ElementType::f32>(estimate_master<L, T::l2>(s, next_p, q));
        const auto packed = encode<L, width>(word_of<L, T::state>(m), est_m, word_of<L, T::state>(v), est_v, L::bits(p),
                                             est_p, next_p, escapes, i - block);
        store_codes<L, width>(codes, i - block, packed);
    }
}

// Two vectors at a time. Nothing is stored before it is known whether every word has a code: old words that escape are
// taken from memory, and a pair with a NaN begins again by itself.
template <typename L>
struct Pair {
    typename L::F p[2], m[2], v[2];
    PairDifferences<L> difference;
};

// In an order that ends lives of values early: registers decide how fast this is.
template <typename L, typename T>
SUPEROFFLOAD_INLINE Pair<L> compute_pair(const Run& run, std::size_t i) {
    const Scalars& s = run.frozen;
    Pair<L> pair;
    typename L::U diff_p[2], diff_m[2], diff_v[2];
#pragma GCC unroll 2
    for (std::size_t k = 0; k < 2; ++k) {
        const std::size_t at = i + k * L::width();
        prefetch<L, T, L::kPrefetchAheadJournaled>(run, at);
        const auto p = L::load(run.master + at);
        const auto m = load_element<L, T::state>(run.exp_avg, at);
        const auto v = load_element<L, T::state>(run.exp_avg_sq, at);
        const auto g = effective_gradient<L, T::l2>(s, load_element<L, T::gradient>(run.gradient, at), p);
        const auto second = second_increment<L>(s, g);
        pair.m[k] = m;
        pair.v[k] = v;
        next_moments<L, T::state>(s, pair.m[k], pair.v[k], g, second, run.index_of(at));
        const auto est_m = estimated_word<L, T::state>(estimate_exp_avg<L>(s, pair.m[k], first_increment<L>(s, g)));
        diff_m[k] = L::sub_u(word_of<L, T::state>(m), est_m);
        const auto est_v = estimated_word<L, T::state>(estimate_exp_avg_sq<L>(s, pair.v[k], second));
        diff_v[k] = L::sub_u(word_of<L, T::state>(v), est_v);
        const auto q = direction<L>(s, pair.m[k], pair.v[k]);
        pair.p[k] = next_master<L, T::l2>(s, p, q);
        const auto est_p = estimated_word<L, ElementType::f32>(estimate_master<L, T::l2>(s, pair.p[k], q));
        diff_p[k] = L::sub_u(L::bits(p), est_p);
    }
    pair.difference = {L::narrow_pair(diff_m[0], diff_m[1]), L::narrow_pair(diff_v[0], diff_v[1]),
                       L::narrow_pair(diff_p[0], diff_p[1])};
    return pair;
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void finish_pair(const Run& run, std::uint8_t* codes, std::size_t block, std::size_t i,
                                     const Pair<L>& pair, BlockEscapes& escapes, bool past_cache) {
    if (__builtin_expect(L::any_nan(pair.p[0], pair.p[1]), 0)) {
        journal_lanes<L, T, width>(run, codes, block, {i, i + 2 * L::width()}, escapes);
        return;
    }
    const auto packed =
        encode_pair<L, T::state, width>(pair.difference, run.exp_avg, run.exp_avg_sq, run.master, i, block, escapes);
    store_pair_codes<L, width>(codes, i - block, packed);
#pragma GCC unroll 2
    for (std::size_t k = 0; k < 2; ++k) {
        const std::size_t at = i + k * L::width();
        store_element<L, T::state>(run.exp_avg, at, pair.m[k]);
        store_element<L, T::state>(run.exp_avg_sq, at, pair.v[k]);
        L::store(run.master + at, pair.p[k]);
    }
    store_shadow_pair<L, T::shadow>(run.shadow, i, pair.p[0], pair.p[1], past_cache);
}

// With registers for it, a pair is stored while the next one is computed: a branch taken by surprise, since something
// escaped, then does not throw the next pair's work away.
template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void journal_pairs(const Run& shared, std::uint8_t* codes, std::size_t block, Range range,
                                       BlockEscapes& escapes) {
    const Run run = shared;
    const bool past_cache = stores_past_cache(run);
    const std::size_t step = 2 * L::width();
    std::size_t i = range.begin;
    if constexpr (L::kPairsOverlap) {
        if (i == range.end) return;
        auto pair = compute_pair<L, T>(run, i);
        for (; i + step < range.end; i += step) {
            const auto next = compute_pair<L, T>(run, i + step);
            finish_pair<L, T, width>(run, codes, block, i, pair, escapes, past_cache);
            pair = next;
        }
        finish_pair<L, T, width>(run, codes, block, i, pair, escapes, past_cache);
    } else {
        for (; i < range.end; i += step) {
            const auto pair = compute_pair<L, T>(run, i);
            finish_pair<L, T, width>(run, codes, block, i, pair, escapes, past_cache);
        }
    }
}

// The old words of one vector from the new ones, in place. An L2 penalty puts the old master into the gradient: the
// master is restored first.
template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void undo_vector(const Run& run, std::size_t i, std::size_t block, EscapeCursor& escapes,
                                     typename L::F& p, typename L::F& m, typename L::F& v) {
    const Scalars& s = run.frozen;
    const auto codes = load_codes<L, width>(run.journal.codes, i);
    p = decode<L, width, 2, ElementType::f32>(codes, estimate_master<L, T::l2>(s, p, direction<L>(s, m, v)));
    const bool escaped = escapes.reaches(i - block + L::width());
    if (__builtin_expect(escaped, 0)) p = escapes.patch<L, 2, ElementType::f32>(p, i - block);
    const auto g = effective_gradient<L, T::l2>(s, load_element<L, T::gradient>(run.gradient, i), p);
    m = decode<L, width, 0, T::state>(codes, estimate_exp_avg<L>(s, m, first_increment<L>(s, g)));
    v = decode<L, width, 1, T::state>(codes, estimate_exp_avg_sq<L>(s, v, second_increment<L>(s, g)));
    if (__builtin_expect(escaped, 0)) {
        m = escapes.patch<L, 0, T::state>(m, i - block);
        v = escapes.patch<L, 1, T::state>(v, i - block);
        escapes.advance();
    }
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void undo_lanes(const Run& shared, std::size_t block, Range range, EscapeCursor& escapes) {
    const Run run = shared;
    for (std::size_t i = range.begin; i < range.end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto p = L::load(run.master + i);
        auto m = load_element<L, T::state>(run.exp_avg, i);
        auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        undo_vector<L, T, width>(run, i, block, escapes, p, m, v);
        store_element<L, T::state>(run.exp_avg, i, m);
        store_element<L, T::state>(run.exp_avg_sq, i, v);
        L::store(run.master + i, p);
    }
}

// Undo and step while the words are in registers.
template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void replay_lanes(const Run& shared, const Scalars& scalars, std::size_t block, Range range,
                                      EscapeCursor& escapes) {
    const Run run = shared;
    const Scalars again = scalars;
    const bool past_cache = stores_past_cache(run);
    for (std::size_t i = range.begin; i < range.end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto p = L::load(run.master + i);
        auto m = load_element<L, T::state>(run.exp_avg, i);
        auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        undo_vector<L, T, width>(run, i, block, escapes, p, m, v);
        step_vector<L, T>(again, run.index_of(i), load_element<L, T::gradient>(run.gradient, i), p, m, v);
        store_element<L, T::state>(run.exp_avg, i, m);
        store_element<L, T::state>(run.exp_avg_sq, i, v);
        L::store(run.master + i, p);
        if (run.shadow != nullptr) store_shadow<L, T::shadow>(run.shadow, i, p, past_cache);
    }
}

// Where whole vectors end; the rest of a range is done by the scalar lanes.
template <typename L>
SUPEROFFLOAD_INLINE std::size_t vector_end(std::size_t begin, std::size_t end) {
    return begin + (end - begin) / L::width() * L::width();
}

SUPEROFFLOAD_INLINE Range block_at(std::size_t begin, std::size_t end) {
    return {begin, begin + kBlock < end ? begin + kBlock : end};
}

// What is left of a range after its last whole vector, for the scalar lanes: a run of its own with an fp32 copy of the
// gradient, which is exact, and an fp32 shadow. So one scalar loop serves every type of the two; with a loop for each,
// half of what the compiler does for an instruction set would be for elements that hardly occur.
struct Tail {
    SUPEROFFLOAD_NOINLINE Tail(const Run& whole, Range range)
        : run(whole), numel(range.end - range.begin), shadow_type_(whole.shadow_type), shadow_(whole.shadow) {
        const std::size_t begin = range.begin;
        run.master += begin;
        run.exp_avg = static_cast<char*>(run.exp_avg) + begin * element_size(run.state_type);
        run.exp_avg_sq = static_cast<char*>(run.exp_avg_sq) + begin * element_size(run.state_type);
        run.journal.codes += run.journal.codes == nullptr ? 0 : begin * run.journal.width;
        run.first_index += begin;
        run.gradient = gradient_values_;
        run.gradient_type = ElementType::f32;
        with_element_type(whole.gradient_type, [&](auto type) {
            for (std::size_t i = 0; i < numel; ++i) {
                gradient_values_[i] = load_element<ScalarLanes, type.value>(whole.gradient, begin + i);
            }
        });
        if (shadow_ == nullptr) return;
        shadow_ = static_cast<char*>(shadow_) + begin * element_size(shadow_type_);
        run.shadow = shadow_values_;
        run.shadow_type = ElementType::f32;
    }

    SUPEROFFLOAD_NOINLINE void publish() const {
        if (shadow_ == nullptr) return;
        with_element_type(shadow_type_, [&](auto type) {
            for (std::size_t i = 0; i < numel; ++i) {
                store_element<ScalarLanes, type.value>(shadow_, i, shadow_values_[i]);
            }
        });
    }

    Run run;  // its element 0 is the first of the tail
    std::size_t numel;

   private:
    ElementType shadow_type_;
    void* shadow_;
    float gradient_values_[kLongestVector];
    float shadow_values_[kLongestVector];
};

template <typename T>
using TailTypes = Types<ElementType::f32, ElementType::f32, T::state, T::l2>;
// Of loops that write no shadow.
template <typename T>
using UndoTypes = Types<T::gradient, ElementType::f32, T::state, T::l2>;

template <typename T>
SUPEROFFLOAD_NOINLINE void step_tail(const Run& run, Range range) {
    Tail tail(run, range);
    step_lanes<ScalarLanes, T>(tail.run, 0, tail.numel);
    tail.publish();
}

template <typename T>
SUPEROFFLOAD_NOINLINE void publish_tail(const Run& run, Range range) {
    Tail tail(run, range);
    publish_lanes<ScalarLanes, T>(tail.run, 0, tail.numel);
    tail.publish();
}

// Elements of a tail count from its own start: that of its block lies before it, at minus something modulo 2^64.
template <typename T, int width>
SUPEROFFLOAD_NOINLINE void undo_tail(const Run& run, std::size_t block, Range range, EscapeCursor& escapes) {
    Tail tail(run, range);
    undo_lanes<ScalarLanes, T, width>(tail.run, block - range.begin, {0, tail.numel}, escapes);
}

template <typename T, int width>
SUPEROFFLOAD_NOINLINE void replay_tail(const Run& run, const Scalars& scalars, std::size_t block, Range range,
                                       EscapeCursor& escapes) {
    Tail tail(run, range);
    replay_lanes<ScalarLanes, T, width>(tail.run, scalars, block - range.begin, {0, tail.numel}, escapes);
    tail.publish();
}

template <typename T, int width>
SUPEROFFLOAD_NOINLINE void journal_tail(const Run& run, std::uint8_t* codes, std::size_t block, Range range,
                                        BlockEscapes& escapes) {
    Tail tail(run, range);
    journal_lanes<ScalarLanes, T, width>(tail.run, codes, block - range.begin, {0, tail.numel}, escapes);
    tail.publish();
}

template <typename L, typename T>
SUPEROFFLOAD_NOINLINE void step_range(const Run& run, Range range) {
    const std::size_t middle = vector_end<L>(range.begin, range.end);
    step_lanes<L, T>(run, range.begin, middle);
    if (middle != range.end) step_tail<TailTypes<T>>(run, {middle, range.end});
}

template <typename L, typename T>
inline void publish_range(const Run& run, Range range) {
    const std::size_t middle = vector_end<L>(range.begin, range.end);
    publish_lanes<L, T>(run, range.begin, middle);
    if (middle != range.end) publish_tail<TailTypes<T>>(run, {middle, range.end});
}

template <typename L, typename T, int width>
SUPEROFFLOAD_NOINLINE void undo_block(const Run& run, Range block, EscapeCursor escapes) {
    const std::size_t middle = vector_end<L>(block.begin, block.end);
    undo_lanes<L, T, width>(run, block.begin, {block.begin, middle}, escapes);
    if (middle != block.end) undo_tail<TailTypes<T>, width>(run, block.begin, {middle, block.end}, escapes);
}

template <typename L, typename T, int width>
inline void replay_block(const Run& run, const Scalars& scalars, Range block, EscapeCursor escapes) {
    const std::size_t middle = vector_end<L>(block.begin, block.end);
    replay_lanes<L, T, width>(run, scalars, block.begin, {block.begin, middle}, escapes);
    if (middle != block.end) replay_tail<TailTypes<T>, width>(run, scalars, block.begin, {middle, block.end}, escapes);
}

template <typename L, typename T, int width>
SUPEROFFLOAD_NOINLINE void journal_loops(const Run& run, std::uint8_t* codes, Range block, BlockEscapes& escapes) {
    const std::size_t middle = vector_end<L>(block.begin, block.end);
    std::size_t done = block.begin;
    if constexpr (L::kPairs) {
        const std::size_t pairs = (block.end - block.begin) / (2 * L::width());
        done += pairs * 2 * L::width();
        journal_pairs<L, T, width>(run, codes, block.begin, {block.begin, done}, escapes);
    }
    journal_lanes<L, T, width>(run, codes, block.begin, {done, middle}, escapes);
    if (middle != block.end) journal_tail<TailTypes<T>, width>(run, codes, block.begin, {middle, block.end}, escapes);
}

// Past the caches codes go as whole lines, once the block is done.
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

// Gives the escapes of the range's blocks their place in the arena. Without room there, the blocks are restored.
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
    Range uncommitted{range.begin, range.begin};
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        if (!waiting.has_room()) {
            if (!commit_or_undo<L, UndoTypes<T>, width>(run, uncommitted, waiting)) return false;
            uncommitted.begin = begin;
        }
        const Range block = block_at(begin, range.end);
        journal_block<L, T, width>(run, block, escapes);
        JournalBlock& entry = run.journal.blocks[begin / kBlock];
        waiting.add(escapes, entry);
        // Where one- and two-byte codes have the same bits, a wide escape is a narrow one too.
        entry.narrow_escapes =
            static_cast<std::uint16_t>(width == 1 ? escapes.total() : escapes.narrow + escapes.component[2].count);
        uncommitted.end = block.end;
    }
    return commit_or_undo<L, UndoTypes<T>, width>(run, uncommitted, waiting);
}

template <typename F>
inline auto with_flag(bool flag, F f) {
    return flag ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f with the run's Types.
template <typename F>
inline auto with_types(const Run& run, ElementType shadow_type, F f) {
    return with_element_type(run.gradient_type, [&](auto gradient) {
        return with_element_type(shadow_type, [&](auto shadow) {
            return with_flag(run.state_type == ElementType::bf16, [&](auto narrow_state) {
                return with_flag(run.frozen.l2, [&](auto l2) {
                    constexpr ElementType state = narrow_state.value ? ElementType::bf16 : ElementType::f32;
                    return f(Types<gradient.value, shadow.value, state, l2.value>{});
                });
            });
        });
    });
}

// Whoever is told that a range is done must find its shadow.
template <typename L>
SUPEROFFLOAD_INLINE void finish_stores(const Run& run) {
    if (run.past_cache) L::fence();
}

template <typename L>
void step_all(const Run& run, Range range) {
    with_types(run, run.shadow_type, [&](auto types) { step_range<L, decltype(types)>(run, range); });
    finish_stores<L>(run);
}

template <typename L>
void publish_all(const Run& run, Range range) {
    with_types(run, run.shadow_type, [&](auto types) { publish_range<L, decltype(types)>(run, range); });
    finish_stores<L>(run);
}

template <typename L>
bool step_journaled_all(const Run& run, Range range) {
    const bool fits = with_types(run, run.shadow_type, [&](auto types) {
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
    with_element_type(run.gradient_type, [&](auto gradient) {
        with_flag(run.state_type == ElementType::bf16, [&](auto narrow_state) {
            with_flag(run.frozen.l2, [&](auto l2) {
                constexpr ElementType state = narrow_state.value ? ElementType::bf16 : ElementType::f32;
                using T = UndoTypes<Types<gradient.value, ElementType::f32, state, l2.value>>;
                run.journal.width == 1 ? undo_range<L, T, 1>(run, range) : undo_range<L, T, 2>(run, range);
            });
        });
    });
}

// A block whose journal has been used is stepped as it is.
template <typename L, typename T, int width>
void replay_range(const Run& run, const Run& again, Range range) {
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        const Range block = block_at(begin, range.end);
        JournalBlock& entry = run.journal.blocks[begin / kBlock];
        if (entry.offset == JournalBlock::kNotApplied) {
            step_range<L, T>(again, block);
        } else {
            replay_block<L, T, width>(run, again.frozen, block, EscapeCursor(entry, *run.journal.arena));
            entry.offset = JournalBlock::kNotApplied;
        }
    }
}

template <typename L>
void replay_all(const Run& run, Range range, const Scalars& scalars) {
    Run again = run;
    again.frozen = scalars;
    with_types(run, run.shadow_type, [&](auto types) {
        using T = decltype(types);
        run.journal.width == 1 ? replay_range<L, T, 1>(run, again, range) : replay_range<L, T, 2>(run, again, range);
    });
    finish_stores<L>(run);
}

template <typename L>
constexpr Kernels kernels_of(const char* name) {
    return {name, step_all<L>, step_journaled_all<L>, undo_all<L>, replay_all<L>, publish_all<L>, pack_all<L>};
}

}  // namespace
}  // namespace superoffload::adam
