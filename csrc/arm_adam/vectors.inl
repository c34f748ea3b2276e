// Loops over the whole vectors of a range, for any lane type: step, journaled step, undo, replay, publish. Part of
// algorithm.inl.
#pragma once

#include <cstdint>

#include "arithmetic.inl"
#include "journal.inl"
#include "kernels.h"
#include "places.inl"
#include "types.inl"

namespace superoffload::adam {
namespace {

// Steps one vector in place, to canonical values as they are stored.
template <typename L, typename T>
SUPEROFFLOAD_INLINE void step_vector(const Scalars& s, typename L::U places, typename L::F gradient, typename L::F& p,
                                     typename L::F& m, typename L::F& v) {
    const auto g = effective_gradient<L>(s, gradient, p);
    next_moments<L, T::state>(s, m, v, g, second_increment<L>(s, g), places);
    p = next_master<L>(s, p, direction<L>(s, m, v));
    make_canonical<L>(m, v, p);
}

// Every loop works on a copy of the run that no store can alias, so that its fields stay in registers.

template <typename L, typename T>
SUPEROFFLOAD_INLINE void step_vectors(const Run& shared, std::size_t begin, std::size_t end) {
    const Run run = shared;
    const bool past_cache = stores_past_cache(run);
    for (std::size_t i = begin; i < end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto p = load_master<L, T::split>(run, i);
        auto m = load_element<L, T::state>(run.exp_avg, i);
        auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        step_vector<L, T>(run.frozen, places_at<L>(run, i), load_element<L, T::gradient>(run.gradient, i), p, m, v);
        store_element<L, T::state>(run.exp_avg, i, m);
        store_element<L, T::state>(run.exp_avg_sq, i, v);
        store_parameters<L, T>(run, i, p, past_cache);
    }
}

template <typename L, typename T>
SUPEROFFLOAD_INLINE void publish_vectors(const Run& shared, std::size_t begin, std::size_t end) {
    const Run run = shared;
    const bool past_cache = stores_past_cache(run);
    for (std::size_t i = begin; i < end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto p = load_master<L, T::split>(run, i);
        auto m = load_element<L, T::state>(run.exp_avg, i);
        auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        step_vector<L, T>(run.frozen, places_at<L>(run, i), load_element<L, T::gradient>(run.gradient, i), p, m, v);
        publish_vector<L, T>(run, i, p, past_cache);
    }
}

// Lets no store bypass the caches: a vector's shadow is half a line, and the other half follows so late that both would
// be written separately. `codes`: of the block.
template <typename L, typename T, int width>
inline void journal_vectors(const Run& shared, std::uint8_t* codes, std::size_t block, Range range,
                            BlockEscapes& escapes) {
    const Run run = shared;
    const Scalars& s = run.frozen;
    for (std::size_t i = range.begin; i < range.end; i += L::width()) {
        prefetch<L, T>(run, i);
        const auto p = load_master<L, T::split>(run, i);
        const auto m = load_element<L, T::state>(run.exp_avg, i);
        const auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        const auto g = effective_gradient<L>(s, load_element<L, T::gradient>(run.gradient, i), p);
        const auto second = second_increment<L>(s, g);
        auto next_m = m;
        auto next_v = v;
        next_moments<L, T::state>(s, next_m, next_v, g, second, places_at<L>(run, i));
        const auto q = direction<L>(s, next_m, next_v);
        auto next_p = next_master<L>(s, p, q);
        make_canonical<L>(next_m, next_v, next_p);
        store_element<L, T::state>(run.exp_avg, i, next_m);
        store_element<L, T::state>(run.exp_avg_sq, i, next_v);
        store_parameters<L, T>(run, i, next_p, false);
        const auto est_m = estimated_word<L, T::state>(estimate_exp_avg<L>(s, next_m, first_increment<L>(s, g)));
        const auto est_v = estimated_word<L, T::state>(estimate_exp_avg_sq<L>(s, next_v, second));
        const auto est_p = estimated_word<L, ElementType::f32>(estimate_master<L>(s, next_p, q));
        const auto packed = encode<L, width>(word_of<L, T::state>(m), est_m, word_of<L, T::state>(v), est_v, L::bits(p),
                                             est_p, next_p, escapes, i - block);
        store_codes<L, width>(codes, i - block, packed);
    }
}

// Holds two vectors' results. Nothing is stored before it is known whether every word has a code. Old words that escape
// are taken from memory.
template <typename L>
struct Pair {
    typename L::F p[2], m[2], v[2];
    PairDifferences<L> difference;
};

// Computes in an order that ends lives of values early, since the number of registers limits the speed. Serves no L2
// penalty: its branch, though it is always predicted, costs the compiler's schedule up to a sixth of the speed.
template <typename L, typename T>
SUPEROFFLOAD_INLINE Pair<L> compute_pair(const Run& run, std::size_t i) {
    const Scalars& s = run.frozen;
    Pair<L> pair;
    typename L::U diff_p[2], diff_m[2], diff_v[2];
#pragma GCC unroll 2
    for (std::size_t k = 0; k < 2; ++k) {
        const std::size_t at = i + k * L::width();
        prefetch<L, T, L::kPrefetchAheadJournaled>(run, at);
        const auto p = load_master<L, T::split>(run, at);
        const auto m = load_element<L, T::state>(run.exp_avg, at);
        const auto v = load_element<L, T::state>(run.exp_avg_sq, at);
        const auto g = L::mul(load_element<L, T::gradient>(run.gradient, at), L::set(s.gradient_factor));
        const auto second = second_increment<L>(s, g);
        pair.m[k] = m;
        pair.v[k] = v;
        next_moments<L, T::state>(s, pair.m[k], pair.v[k], g, second, places_at<L>(run, at));
        const auto est_m = estimated_word<L, T::state>(estimate_exp_avg<L>(s, pair.m[k], first_increment<L>(s, g)));
        diff_m[k] = L::sub_u(word_of<L, T::state>(m), est_m);
        const auto est_v = estimated_word<L, T::state>(estimate_exp_avg_sq<L>(s, pair.v[k], second));
        diff_v[k] = L::sub_u(word_of<L, T::state>(v), est_v);
        const auto q = direction<L>(s, pair.m[k], pair.v[k]);
        pair.p[k] = next_master<L>(s, p, q);
        const auto est_p = estimated_word<L, ElementType::f32>(estimate_master<L>(s, pair.p[k], q));
        diff_p[k] = L::sub_u(L::bits(p), est_p);
    }
    pair.difference = {L::narrow_pair(diff_m[0], diff_m[1]), L::narrow_pair(diff_v[0], diff_v[1]),
                       L::narrow_pair(diff_p[0], diff_p[1])};
    return pair;
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void finish_pair(const Run& run, std::uint8_t* codes, std::size_t block, std::size_t i,
                                     const Pair<L>& pair, BlockEscapes& escapes, bool past_cache) {
    const auto packed = encode_pair<L, T, width>(pair.difference, run, i, block, escapes);
    store_pair_codes<L, width>(codes, i - block, packed);
#pragma GCC unroll 2
    for (std::size_t k = 0; k < 2; ++k) {
        const std::size_t at = i + k * L::width();
        store_element<L, T::state>(run.exp_avg, at, pair.m[k]);
        store_element<L, T::state>(run.exp_avg_sq, at, pair.v[k]);
        store_master<L, T::split>(run, at, pair.p[k]);
    }
    if constexpr (!T::split) store_shadow_pair<L, T::shadow>(run.shadow, i, pair.p[0], pair.p[1], past_cache);
}

template <typename L>
SUPEROFFLOAD_INLINE bool has_nan(const Pair<L>& pair) {
    return __builtin_expect(L::any_nan(pair.p[0], pair.p[1]), 0);
}

// Steps pairs up to the first with a NaN and returns where that one begins: a call from this loop would cost it its
// registers. Stores a pair while the next one is computed, if there are registers for it. A mispredicted branch on an
// escape then does not discard the next pair's work.
template <typename L, typename T, int width>
SUPEROFFLOAD_NOINLINE std::size_t journal_pairs(const Run& shared, std::uint8_t* codes, std::size_t block, Range range,
                                                BlockEscapes& escapes) {
    const Run run = shared;
    const bool past_cache = stores_past_cache(run);
    const std::size_t step = 2 * L::width();
    std::size_t i = range.begin;
    if constexpr (L::kPairsOverlap) {
        if (i == range.end) return i;
        auto pair = compute_pair<L, T>(run, i);
        for (; i + step < range.end; i += step) {
            const auto next = compute_pair<L, T>(run, i + step);
            if (has_nan<L>(pair)) return i;
            finish_pair<L, T, width>(run, codes, block, i, pair, escapes, past_cache);
            pair = next;
        }
        if (has_nan<L>(pair)) return i;
        finish_pair<L, T, width>(run, codes, block, i, pair, escapes, past_cache);
        return range.end;
    } else {
        for (; i < range.end; i += step) {
            const auto pair = compute_pair<L, T>(run, i);
            if (has_nan<L>(pair)) return i;
            finish_pair<L, T, width>(run, codes, block, i, pair, escapes, past_cache);
        }
        return i;
    }
}

// Restores the old words of one vector from the new ones, in place. An L2 penalty puts the old master into the
// gradient, so the master is restored first.
template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void undo_vector(const Run& run, std::size_t i, std::size_t block, EscapeCursor& escapes,
                                     typename L::F& p, typename L::F& m, typename L::F& v) {
    const Scalars& s = run.frozen;
    const auto codes = load_codes<L, width>(run.journal.codes, i);
    p = decode<L, width, 2, ElementType::f32>(codes, estimate_master<L>(s, p, direction<L>(s, m, v)));
    const bool escaped = escapes.reaches(i - block + L::width());
    if (__builtin_expect(escaped, 0)) p = escapes.patch<L, 2, ElementType::f32>(p, i - block);
    const auto g = effective_gradient<L>(s, load_element<L, T::gradient>(run.gradient, i), p);
    m = decode<L, width, 0, T::state>(codes, estimate_exp_avg<L>(s, m, first_increment<L>(s, g)));
    v = decode<L, width, 1, T::state>(codes, estimate_exp_avg_sq<L>(s, v, second_increment<L>(s, g)));
    if (__builtin_expect(escaped, 0)) {
        m = escapes.patch<L, 0, T::state>(m, i - block);
        v = escapes.patch<L, 1, T::state>(v, i - block);
        escapes.advance();
    }
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void undo_vectors(const Run& shared, std::size_t block, Range range, EscapeCursor& escapes) {
    const Run run = shared;
    for (std::size_t i = range.begin; i < range.end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto p = load_master<L, T::split>(run, i);
        auto m = load_element<L, T::state>(run.exp_avg, i);
        auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        undo_vector<L, T, width>(run, i, block, escapes, p, m, v);
        store_element<L, T::state>(run.exp_avg, i, m);
        store_element<L, T::state>(run.exp_avg_sq, i, v);
        store_master<L, T::split>(run, i, p);
    }
}

// Undoes and steps while the words are in registers.
template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void replay_vectors(const Run& shared, const Scalars& scalars, std::size_t block, Range range,
                                        EscapeCursor& escapes) {
    const Run run = shared;
    const Scalars again = scalars;
    const bool past_cache = stores_past_cache(run);
    for (std::size_t i = range.begin; i < range.end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto p = load_master<L, T::split>(run, i);
        auto m = load_element<L, T::state>(run.exp_avg, i);
        auto v = load_element<L, T::state>(run.exp_avg_sq, i);
        undo_vector<L, T, width>(run, i, block, escapes, p, m, v);
        step_vector<L, T>(again, places_at<L>(run, i), load_element<L, T::gradient>(run.gradient, i), p, m, v);
        store_element<L, T::state>(run.exp_avg, i, m);
        store_element<L, T::state>(run.exp_avg_sq, i, v);
        store_parameters<L, T>(run, i, p, past_cache);
    }
}

}  // namespace
}  // namespace superoffload::adam
