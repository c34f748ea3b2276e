// Finds the places of elements in the whole parameter, which key the noise of stochastic rounding. Part of
// algorithm.inl.
#pragma once

#include <cstdint>

#include "access.inl"
#include "adam.h"

namespace superoffload::adam {
namespace {

SUPEROFFLOAD_INLINE Range block_at(std::size_t begin, std::size_t end) {
    return {begin, begin + kBlock < end ? begin + kBlock : end};
}

// Returns the places of a vector's elements.
template <typename L>
SUPEROFFLOAD_INLINE typename L::U places_at(const Run& run, std::size_t i) {
    if (run.places != nullptr) return L::bits(L::load(run.places + i % kBlock));
    return L::add_u(L::iota(), L::set_u(run.place_of(i)));
}

SUPEROFFLOAD_INLINE bool needs_places(const Run& run) {
    return run.axis_count != 0 && run.state_type != ElementType::f32;
}

// Holds a run and, where the shard has axes, the places of one block's elements. With a table, vectors that cross the
// end of a row need no division and no branch.
template <typename L>
class PlacedRun {
   public:
    explicit PlacedRun(const Run& run) : run_(run), start_(run.start) {}
    PlacedRun(const PlacedRun&) = delete;
    PlacedRun& operator=(const PlacedRun&) = delete;

    // Returns the run, with the places of `block`.
    SUPEROFFLOAD_NOINLINE const Run& at(Range block) {
        if (!needs_places(run_)) return run_;
        const std::uint64_t first = run_.first_index + block.begin;
        if (run_.axes[0].stride == 1 && rest_of_row(first) >= block.end - block.begin) {
            run_.places = nullptr;
            run_.start = place_of(first) - static_cast<std::uint32_t>(first);
        } else {
            run_.places = table_;
            fill(first, block.end - block.begin);
        }
        return run_;
    }

   private:
    // Writes whole vectors: what reaches past a row, the next one overwrites.
    void fill(std::uint64_t index, std::size_t count) {
        const std::uint32_t stride = run_.axes[0].stride;
        const auto steps = L::mul_u(L::iota(), L::set_u(stride));
        for (std::size_t done = 0; done < count;) {
            const std::uint64_t rest = rest_of_row(index);
            const std::size_t end = rest < count - done ? done + static_cast<std::size_t>(rest) : count;
            std::uint32_t place = place_of(index);
            index += end - done;
            for (; done < end; done += L::width(), place += stride * static_cast<std::uint32_t>(L::width())) {
                L::store(table_ + done, L::from_bits(L::add_u(steps, L::set_u(place))));
            }
            done = end;
        }
    }

    // Counts the elements of the innermost axis from the one at `index` of the shard on.
    std::uint64_t rest_of_row(std::uint64_t index) const {
        return run_.axis_count == 1 ? ~std::uint64_t{0} : run_.axes[0].length - index % run_.axes[0].length;
    }

    // Returns the place of the element at `index` of the shard.
    std::uint32_t place_of(std::uint64_t index) const {
        std::uint32_t place = start_;
        for (std::uint32_t k = 0; k < run_.axis_count; ++k) {
            const bool outermost = k + 1 == run_.axis_count;
            const std::uint64_t along = outermost ? index : index % run_.axes[k].length;
            place += static_cast<std::uint32_t>(along) * run_.axes[k].stride;
            index /= run_.axes[k].length;
        }
        return place;
    }

    Run run_;
    std::uint32_t start_;
    alignas(64) float table_[kBlock + kLongestVector];
};

// Calls f with the run and the range, block by block where elements need their places or are presented as fp32.
template <typename L, typename F>
inline void for_each_placed(const Run& run, Range range, bool in_blocks, F f) {
    if (!needs_places(run) && !in_blocks) return f(run, range);
    PlacedRun<L> placed(run);
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        const Range block = block_at(begin, range.end);
        f(placed.at(block), block);
    }
}

}  // namespace
}  // namespace superoffload::adam
