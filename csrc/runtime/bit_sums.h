// Detects changes of memory by two sums of its words, fast enough to read every parameter each step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace superoffload {

struct BitSums {
    std::uint64_t plain;     // each word times an odd number of its lane: changing any one word changes the sum
    std::uint64_t weighted;  // by position too, so that words which change places or change back and forth show
};

struct Memory {
    const void* begin;
    std::size_t bytes;
};

constexpr std::size_t kSumsChunk = 4 << 20;  // bytes; sums are taken chunk by chunk, so they do not depend on threads

// Sums 8-byte words, modulo 2^64; a remainder counts as one more word, padded with zeros. Any alignment is allowed.
// Starts threads for this call alone, and only if there is enough to read.
std::vector<BitSums> bit_sums(const std::vector<Memory>& runs, unsigned threads);

}  // namespace superoffload
