#include "bit_sums.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>

namespace superoffload {
namespace {

// Holds two words, on every instruction set: wider vectors would not be faster than memory.
typedef std::uint64_t Pair
    __attribute__((vector_size(16)));  // NOLINT: an attribute that `using` does not take everywhere
constexpr std::size_t kPairs = 4;      // sums side by side, so that additions need not wait
constexpr std::size_t kLine = kPairs * sizeof(Pair);
constexpr std::uint64_t kNextChunk = 0x9E3779B97F4A7C15ull;
constexpr unsigned kMostThreads = 8;         // together they are as fast as memory
constexpr std::size_t kChunksPerThread = 8;  // for less, starting a thread takes longer than it saves

constexpr std::uint64_t odd(std::size_t lane) { return 2 * (lane * 0x9E3779B97F4A7C15ull) + 1; }

BitSums sums_of_chunk(const Memory& chunk) {
    const char* at = static_cast<const char*>(chunk.begin);
    Pair plain[kPairs] = {};
    Pair weighted[kPairs] = {};
    for (const char* const end = at + chunk.bytes / kLine * kLine; at != end; at += kLine) {
        for (std::size_t i = 0; i < kPairs; ++i) {
            Pair words;
            std::memcpy(&words, at + i * sizeof(Pair), sizeof(Pair));
            plain[i] += words;
            weighted[i] += plain[i];  // so a word counts once more for each later line
        }
    }
    Pair rest[kPairs] = {};
    if (chunk.bytes % kLine != 0) std::memcpy(rest, at, chunk.bytes % kLine);
    BitSums sums{chunk.bytes, 0};
    for (std::size_t i = 0; i < kPairs; ++i) {
        plain[i] += rest[i];
        weighted[i] += plain[i];
        for (std::size_t lane = 0; lane < 2; ++lane) {
            sums.plain += plain[i][lane] * odd(2 * i + lane);
            sums.weighted += weighted[i][lane] * odd(2 * i + lane);
        }
    }
    return sums;
}

}  // namespace

std::vector<BitSums> bit_sums(const std::vector<Memory>& runs, unsigned threads) {
    std::vector<Memory> chunks;
    for (const Memory& run : runs) {
        for (std::size_t at = 0; at < run.bytes; at += kSumsChunk) {
            chunks.push_back({static_cast<const char*>(run.begin) + at, std::min(kSumsChunk, run.bytes - at)});
        }
    }
    std::vector<BitSums> of_chunks(chunks.size());
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < chunks.size();) {
            of_chunks[i] = sums_of_chunk(chunks[i]);
        }
    };
    std::vector<std::thread> helpers;
    const std::size_t wanted = std::min<std::size_t>({threads, kMostThreads, chunks.size() / kChunksPerThread});
    helpers.reserve(wanted);
    try {
        while (helpers.size() + 1 < wanted) helpers.emplace_back(work);
    } catch (const std::system_error&) {  // the system has no more threads, so fewer do the work
    }
    work();
    for (std::thread& helper : helpers) helper.join();
    std::vector<BitSums> found;
    found.reserve(runs.size());
    auto chunk = of_chunks.begin();
    for (const Memory& run : runs) {
        BitSums sums{0, 0};
        for (std::size_t at = 0; at < run.bytes; at += kSumsChunk, ++chunk) {
            sums = {sums.plain * kNextChunk + chunk->plain, sums.weighted * kNextChunk + chunk->weighted};
        }
        found.push_back(sums);
    }
    return found;
}

}  // namespace superoffload
