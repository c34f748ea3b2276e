// Presents elements to loops of other types: fp16 beside another type as fp32, and a range after its last whole vector,
// or whole block of 8-bit moments, to the scalar lanes. Part of algorithm.inl.
#pragma once

#include "lanes_scalar.h"
#include "loops.inl"

namespace superoffload::adam {
namespace {

// Presents a range as a run of its own, with an exact fp32 copy of the gradient and, unless the master is split, an
// fp32 shadow. So one loop serves all types of gradient and shadow; a loop for each would double the code of an
// instruction set, for elements that hardly occur. `all`: also bf16, else only fp16.
template <typename L, std::size_t longest, bool all>
struct InFp32 {
    SUPEROFFLOAD_NOINLINE InFp32(const Run& whole, Range range)
        : run(whole), numel(range.end - range.begin), shadow_type_(whole.shadow_type), shadow_(whole.shadow) {
        const std::size_t begin = range.begin;
        run.master = static_cast<char*>(run.master) + begin * (run.split_master ? 2 : 4);
        if (run.kept_halves != nullptr) run.kept_halves += begin;
        run.exp_avg = static_cast<char*>(run.exp_avg) + begin * element_size(run.state_type);
        run.exp_avg_sq = static_cast<char*>(run.exp_avg_sq) + begin * element_size(run.state_type);
        run.journal.codes += run.journal.codes == nullptr ? 0 : begin * run.journal.width;
        run.first_index += begin;
        if (run.places != nullptr) run.places += begin % kBlock;
        if (run.state_type == ElementType::q8) {
            run.exp_avg_scales += begin / kMomentBlock;
            run.exp_avg_sq_scales += begin / kMomentBlock;
        }
        run.gradient = static_cast<const char*>(whole.gradient) + begin * element_size(whole.gradient_type);
        if (all || whole.gradient_type == ElementType::f16) {
            convert(gradient_values_, ElementType::f32, run.gradient, whole.gradient_type, false);
            run.gradient = gradient_values_;
            run.gradient_type = ElementType::f32;
        }
        if (shadow_ == nullptr) return;
        shadow_ = static_cast<char*>(shadow_) + begin * element_size(shadow_type_);
        run.shadow = shadow_;
        if (run.split_master || !(all || shadow_type_ == ElementType::f16)) return;
        run.shadow = shadow_values_;
        run.shadow_type = ElementType::f32;
        run.past_cache = false;
        past_cache_ = stores_past_cache(whole);
    }
    InFp32(const InFp32&) = delete;
    InFp32& operator=(const InFp32&) = delete;

    void publish() const {
        if (run.shadow == shadow_values_) {
            convert(shadow_, shadow_type_, shadow_values_, ElementType::f32, past_cache_);
        }
    }

    Run run;  // its element 0 is the first of the range
    std::size_t numel;

   private:
    SUPEROFFLOAD_NOINLINE void convert(void* to, ElementType to_type, const void* from, ElementType from_type,
                                       bool past_cache) const {
        const std::size_t middle = numel / L::width() * L::width();
        convert_lanes<L>(to, to_type, from, from_type, {0, middle}, past_cache);
        convert_lanes<ScalarLanes>(to, to_type, from, from_type, {middle, numel}, false);
    }

    template <typename Lanes>
    static void convert_lanes(void* to, ElementType to_type, const void* from, ElementType from_type, Range range,
                              bool past_cache) {
        with_any_type(from_type, [&](auto source) {
            with_any_type(to_type, [&](auto target) {
                for (std::size_t i = range.begin; i < range.end; i += Lanes::width()) {
                    store_shadow<Lanes, target.value>(to, i, load_element<Lanes, source.value>(from, i), past_cache);
                }
            });
        });
    }

    ElementType shadow_type_;
    void* shadow_;
    bool past_cache_ = false;
    alignas(64) float gradient_values_[longest];
    alignas(64) float shadow_values_[longest];
};

using Tail = InFp32<ScalarLanes, (kMomentBlock > kLongestVector ? kMomentBlock : kLongestVector), true>;

// Calls f with a block of a run, and presents fp16 as fp32. `publishes`: f writes the shadow, as all but undo do.
template <typename L, bool publishes = true, typename F>
SUPEROFFLOAD_INLINE void in_fp32(const Run& run, Range block, F f) {
    if (__builtin_expect(!presents_fp16(run), 1)) return f(run, block);
    const InFp32<L, kBlock, false> presented(run, block);
    f(presented.run, Range{0, presented.numel});
    if constexpr (publishes) presented.publish();
}

template <typename T>
using TailTypes = Types<ElementType::f32, ElementType::f32, T::state, T::split>;

template <typename T>
SUPEROFFLOAD_NOINLINE void step_tail(const Run& run, Range range) {
    const Tail tail(run, range);
    step_lanes<ScalarLanes, T>(tail.run, 0, tail.numel);
    tail.publish();
}

template <typename T>
SUPEROFFLOAD_NOINLINE void publish_tail(const Run& run, Range range) {
    const Tail tail(run, range);
    publish_lanes<ScalarLanes, T>(tail.run, 0, tail.numel);
    tail.publish();
}

// Counts elements from the tail's own start, so the start of its block is negative, modulo 2^64.
template <typename T, int width>
SUPEROFFLOAD_NOINLINE void undo_tail(const Run& run, std::size_t block, Range range, EscapeCursor& escapes) {
    const Tail tail(run, range);
    undo_lanes<ScalarLanes, T, width>(tail.run, block - range.begin, {0, tail.numel}, escapes);
}

template <typename T, int width>
SUPEROFFLOAD_NOINLINE void replay_tail(const Run& run, const Scalars& scalars, std::size_t block, Range range,
                                       EscapeCursor& escapes) {
    const Tail tail(run, range);
    replay_lanes<ScalarLanes, T, width>(tail.run, scalars, block - range.begin, {0, tail.numel}, escapes);
    tail.publish();
}

template <typename T, int width>
SUPEROFFLOAD_NOINLINE void journal_tail(const Run& run, std::uint8_t* codes, std::size_t block, Range range,
                                        BlockEscapes& escapes) {
    const Tail tail(run, range);
    journal_lanes<ScalarLanes, T, width>(tail.run, codes, block - range.begin, {0, tail.numel}, escapes);
    tail.publish();
}

}  // namespace
}  // namespace superoffload::adam
