// Handles the elements of a range after its last whole vector, or whole block of 8-bit moments. Part of algorithm.inl.
#pragma once

#include "lanes_scalar.h"
#include "loops.inl"

namespace superoffload::adam {
namespace {

// Presents a tail to the scalar lanes as a run with an exact fp32 copy of the gradient and, unless the master is split,
// an fp32 shadow. So one scalar loop serves all types of gradient and shadow; a loop for each would be half of the code
// of an instruction set, for elements that hardly occur.
struct Tail {
    SUPEROFFLOAD_NOINLINE Tail(const Run& whole, Range range)
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
        run.gradient = gradient_values_;
        run.gradient_type = ElementType::f32;
        with_element_type(whole.gradient_type, [&](auto type) {
            for (std::size_t i = 0; i < numel; ++i) {
                gradient_values_[i] = load_element<ScalarLanes, type.value>(whole.gradient, begin + i);
            }
        });
        if (shadow_ == nullptr) return;
        shadow_ = static_cast<char*>(shadow_) + begin * element_size(shadow_type_);
        if (run.split_master) {
            run.shadow = shadow_;
            return;
        }
        run.shadow = shadow_values_;
        run.shadow_type = ElementType::f32;
    }

    SUPEROFFLOAD_NOINLINE void publish() const {
        if (shadow_ == nullptr || run.split_master) return;
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
    static constexpr std::size_t kLongest = kMomentBlock > kLongestVector ? kMomentBlock : kLongestVector;
    float gradient_values_[kLongest];
    float shadow_values_[kLongest];
};

template <typename T>
using TailTypes = Types<ElementType::f32, ElementType::f32, T::state, T::l2, T::split>;

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

// Counts elements from the tail's own start, so the start of its block is negative, modulo 2^64.
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

}  // namespace
}  // namespace superoffload::adam
