// Collects the escapes of one block while it is stepped. They move to the bucket's arena once the block is done.
#pragma once

#include <cstdint>
#include <cstring>

#include "adam.h"

namespace superoffload::adam {
namespace {

struct EscapeList {
    static constexpr std::size_t kSlack = 64;  // vector stores write whole registers
    std::uint32_t count;
    std::uint32_t old[kBlock + kSlack];
    std::uint16_t index[kBlock + kSlack];

    void append(std::uint32_t i, std::uint32_t old_bits) {
        old[count] = old_bits;
        index[count] = static_cast<std::uint16_t>(i);
        ++count;
    }
};

// Holds exp_avg, exp_avg_sq, master, in the order of JournalBlock::escapes.
struct BlockEscapes {
    EscapeList component[3];
    std::uint32_t narrow;
    std::uint8_t scales[2][kBlock / kMomentBlock];  // of 8-bit moments, which undo puts back

    void clear() {
        for (EscapeList& list : component) list.count = 0;
        narrow = 0;
        std::memset(scales, 0, sizeof scales);  // the journal has them whatever the moments are
    }
    void keep_scales(std::size_t index, std::uint8_t exp_avg, std::uint8_t exp_avg_sq) {
        scales[0][index / kMomentBlock] = exp_avg;
        scales[1][index / kMomentBlock] = exp_avg_sq;
    }
    std::uint32_t total() const { return component[0].count + component[1].count + component[2].count; }
};

}  // namespace
}  // namespace superoffload::adam
