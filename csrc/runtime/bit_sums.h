// Whether memory still has the bits that it had: two sums of its words, quick enough to read every parameter each step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace superoffload {

struct BitSums {
    std::uint64_t plain;     // each word times an odd number of its lane: changing any one word changes it
    std::uint64_t weighted;  // by position too, so that words which change places or change back and forth show
};

struct Memory {
    const void* begin;
    std::size_t bytes;
};

constexpr std::size_t kSumsChunk = 4 << 20;  // bytes; chunk by chunk, so that sums do not depend on threads

// Modulo 2^64, of 8-byte words; what is left over counts as one more, filled up with zeros. Any alignment. Threads are
// started for this call alone, and only where there is so much to read that it pays.
std::vector<BitSums> bit_sums(const std::vector<Memory>& runs, unsigned threads);

}  // namespace superoffload
