// Loops over the blocks of 8-bit moments, for any lane type: step, journaled step, undo, replay, publish. A block's
// scale is known only when all of its new moments are, so a step has two passes, the second over the first-level cache.
// Part of algorithm.inl.
#pragma once

#include "access.inl"
#include "arithmetic.inl"
#include "journal.inl"
#include "moment_codes.inl"
#include "places.inl"
#include "types.inl"

namespace superoffload::adam {
namespace {

// Holds the new moments of a block before they are rounded.
struct RawMoments {
    alignas(64) float exp_avg[kMomentBlock];
    alignas(64) float exp_avg_sq[kMomentBlock];
};

// Returns where a block's scale is. Blocks of a run begin at its first element.
inline std::uint8_t& scale_at(std::uint8_t* scales, std::size_t i) { return scales[i / kMomentBlock]; }

// Calls f with each block of a range that begins at one.
template <typename F>
SUPEROFFLOAD_INLINE void for_each_moment_block(Range range, F f) {
    for (std::size_t begin = range.begin; begin < range.end; begin += kMomentBlock) {
        f(Range{begin, begin + kMomentBlock < range.end ? begin + kMomentBlock : range.end});
    }
}

// Computes a block's new moments and sets `scales` (exp_avg, exp_avg_sq) to theirs.
template <typename L, typename T>
SUPEROFFLOAD_INLINE void compute_raw_moments(const Run& run, Range block, RawMoments& raw, std::uint32_t scales[2]) {
    const Scalars& s = run.frozen;
    const Grid<0> first_grid(scale_at(run.exp_avg_scales, block.begin));
    const Grid<1> second_grid(scale_at(run.exp_avg_sq_scales, block.begin));
    auto largest_m = L::set_u(0);
    auto largest_v = L::set_u(0);
    for (std::size_t i = block.begin; i < block.end; i += L::width()) {
        prefetch<L, T>(run, i);
        auto g = load_element<L, T::gradient>(run.gradient, i);
        g = effective_gradient<L>(s, g, s.l2 ? load_master<L, T::split>(run, i) : g);
        auto m = load_moment<L>(run.exp_avg, i, first_grid);
        auto v = load_moment<L>(run.exp_avg_sq, i, second_grid);
        next_moments<L, ElementType::f32>(s, m, v, g, second_increment<L>(s, g), L::set_u(0));
        L::store(raw.exp_avg + (i - block.begin), m);
        L::store(raw.exp_avg_sq + (i - block.begin), v);
        largest_m = L::max_u(largest_m, L::bits(absolute<L>(m)));
        largest_v = L::max_u(largest_v, L::bits(v));  // never negative; a NaN of either sign is above all numbers
    }
    scales[0] = scale_of<0>(L::largest_of(largest_m));
    scales[1] = scale_of<1>(L::largest_of(largest_v));
}

// Rounds one vector of raw moments and steps its masters, in place. Returns the codes in `code_m` and `code_v`.
template <typename L, typename T>
SUPEROFFLOAD_INLINE void round_and_step(const Run& run, std::size_t i, const Grid<0>& first, const Grid<1>& second,
                                        typename L::F& m, typename L::F& v, typename L::F& p, typename L::F& q,
                                        typename L::U& code_m, typename L::U& code_v) {
    typename L::U noise_m, noise_v;
    moment_noise<L>(run.frozen, places_at<L>(run, i), noise_m, noise_v);
    code_m = round_moment<L>(m, noise_m, first);
    code_v = round_moment<L>(v, noise_v, second);
    q = direction<L>(run.frozen, m, v);
    p = next_master<L>(run.frozen, p, q);
    make_canonical<L>(m, v, p);
}

template <typename L>
SUPEROFFLOAD_INLINE void store_moments(const Run& run, std::size_t i, typename L::U code_m, typename L::U code_v) {
    L::store_codes8_of_both(static_cast<std::uint8_t*>(run.exp_avg) + i, static_cast<std::uint8_t*>(run.exp_avg_sq) + i,
                            code_m, code_v);
}

template <typename L, typename T, bool publishes>
SUPEROFFLOAD_INLINE void step_moment_block(const Run& run, Range block, bool past_cache) {
    RawMoments raw;
    std::uint32_t scales[2];
    compute_raw_moments<L, T>(run, block, raw, scales);
    const Grid<0> first(scales[0]);
    const Grid<1> second(scales[1]);
    for (std::size_t i = block.begin; i < block.end; i += L::width()) {
        auto m = L::load(raw.exp_avg + (i - block.begin));
        auto v = L::load(raw.exp_avg_sq + (i - block.begin));
        auto p = load_master<L, T::split>(run, i);
        typename L::F q;
        typename L::U code_m, code_v;
        round_and_step<L, T>(run, i, first, second, m, v, p, q, code_m, code_v);
        if constexpr (publishes) {
            publish_vector<L, T>(run, i, p, past_cache);
        } else {
            store_moments<L>(run, i, code_m, code_v);
            store_parameters<L, T>(run, i, p, past_cache);
        }
    }
    if constexpr (!publishes) {
        scale_at(run.exp_avg_scales, block.begin) = static_cast<std::uint8_t>(scales[0]);
        scale_at(run.exp_avg_sq_scales, block.begin) = static_cast<std::uint8_t>(scales[1]);
    }
}

template <typename L, typename T, bool publishes>
SUPEROFFLOAD_INLINE void step_moment_blocks(const Run& shared, Range range) {
    const Run run = shared;
    const bool past_cache = stores_past_cache(run);
    for_each_moment_block(range, [&](Range block) { step_moment_block<L, T, publishes>(run, block, past_cache); });
}

// Steps a block and writes its journal; `codes` and indices of escapes begin at `journal_block`. The old scales are
// kept with the escapes.
template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void journal_moment_block(const Run& run, std::uint8_t* codes, std::size_t journal_block,
                                              Range block, BlockEscapes& escapes) {
    RawMoments raw;
    std::uint32_t scales[2];
    compute_raw_moments<L, T>(run, block, raw, scales);
    const Scalars& s = run.frozen;
    std::uint8_t& scale_m = scale_at(run.exp_avg_scales, block.begin);
    std::uint8_t& scale_v = scale_at(run.exp_avg_sq_scales, block.begin);
    escapes.keep_scales(block.begin - journal_block, scale_m, scale_v);
    const Grid<0> first(scales[0]), old_first(scale_m);
    const Grid<1> second(scales[1]), old_second(scale_v);
    for (std::size_t i = block.begin; i < block.end; i += L::width()) {
        auto m = L::load(raw.exp_avg + (i - block.begin));
        auto v = L::load(raw.exp_avg_sq + (i - block.begin));
        const auto p = load_master<L, T::split>(run, i);
        const auto g = effective_gradient<L>(s, load_element<L, T::gradient>(run.gradient, i), p);
        auto next_p = p;
        typename L::F q;
        typename L::U code_m, code_v;
        round_and_step<L, T>(run, i, first, second, m, v, next_p, q, code_m, code_v);
        const auto est_m = estimated_code_word<L>(estimate_exp_avg<L>(s, m, first_increment<L>(s, g)), old_first);
        const auto est_v = estimated_code_word<L>(estimate_exp_avg_sq<L>(s, v, second_increment<L>(s, g)), old_second);
        const auto est_p = estimated_word<L, ElementType::f32>(estimate_master<L>(s, next_p, q));
        const auto old_m = load_code_word<L, 0>(run.exp_avg, i);
        const auto old_v = load_code_word<L, 1>(run.exp_avg_sq, i);
        store_moments<L>(run, i, code_m, code_v);
        store_parameters<L, T>(run, i, next_p, false);
        const std::size_t at = i - journal_block;
        store_codes<L, width>(codes, at,
                              encode<L, width>(old_m, est_m, old_v, est_v, L::bits(p), est_p, next_p, escapes, at));
    }
    scale_m = static_cast<std::uint8_t>(scales[0]);
    scale_v = static_cast<std::uint8_t>(scales[1]);
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void journal_moment_blocks(const Run& shared, std::uint8_t* codes, std::size_t journal_block,
                                               Range range, BlockEscapes& escapes) {
    const Run run = shared;
    for_each_moment_block(
        range, [&](Range block) { journal_moment_block<L, T, width>(run, codes, journal_block, block, escapes); });
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void undo_moment_block(const Run& run, std::size_t journal_block, Range block,
                                           EscapeCursor& escapes) {
    const Scalars& s = run.frozen;
    std::uint8_t& scale_m = scale_at(run.exp_avg_scales, block.begin);
    std::uint8_t& scale_v = scale_at(run.exp_avg_sq_scales, block.begin);
    const Grid<0> first(scale_m), old_first(escapes.scale(0, block.begin - journal_block));
    const Grid<1> second(scale_v), old_second(escapes.scale(1, block.begin - journal_block));
    for (std::size_t i = block.begin; i < block.end; i += L::width()) {
        const auto codes = load_codes<L, width>(run.journal.codes, i);
        const std::size_t at = i - journal_block;
        const bool escaped = escapes.reaches(at + L::width());
        const auto m = load_moment<L>(run.exp_avg, i, first);
        const auto v = load_moment<L>(run.exp_avg_sq, i, second);
        const auto est_p = estimate_master<L>(s, load_master<L, T::split>(run, i), direction<L>(s, m, v));
        auto p = decode<L, width, 2, ElementType::f32>(codes, est_p);
        if (__builtin_expect(escaped, 0)) p = escapes.patch<L, 2, ElementType::f32>(p, at);
        const auto g = effective_gradient<L>(s, load_element<L, T::gradient>(run.gradient, i), p);
        const auto est_m = estimated_code_word<L>(estimate_exp_avg<L>(s, m, first_increment<L>(s, g)), old_first);
        const auto est_v = estimated_code_word<L>(estimate_exp_avg_sq<L>(s, v, second_increment<L>(s, g)), old_second);
        auto old_m = old_word<L, width, 0>(codes, est_m);
        auto old_v = old_word<L, width, 1>(codes, est_v);
        if (__builtin_expect(escaped, 0)) {
            old_m = L::bits(escapes.patch<L, 0, ElementType::f32>(L::from_bits(old_m), at));
            old_v = L::bits(escapes.patch<L, 1, ElementType::f32>(L::from_bits(old_v), at));
            escapes.advance();
        }
        store_moments<L>(run, i, code_of_word<L, 0>(old_m), code_of_word<L, 1>(old_v));
        store_master<L, T::split>(run, i, p);
    }
    scale_m = escapes.scale(0, block.begin - journal_block);
    scale_v = escapes.scale(1, block.begin - journal_block);
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void undo_moment_blocks(const Run& shared, std::size_t journal_block, Range range,
                                            EscapeCursor& escapes) {
    const Run run = shared;
    for_each_moment_block(range,
                          [&](Range block) { undo_moment_block<L, T, width>(run, journal_block, block, escapes); });
}

// Undoes and steps a block while the first-level cache has it.
template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE void replay_moment_blocks(const Run& shared, const Scalars& scalars, std::size_t journal_block,
                                              Range range, EscapeCursor& escapes) {
    const Run run = shared;
    Run again = shared;
    again.frozen = scalars;
    const bool past_cache = stores_past_cache(run);
    for_each_moment_block(range, [&](Range block) {
        undo_moment_block<L, T, width>(run, journal_block, block, escapes);
        step_moment_block<L, T, false>(again, block, past_cache);
    });
}

}  // namespace
}  // namespace superoffload::adam
