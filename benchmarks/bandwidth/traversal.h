// Measures the machine's own limit: how fast threads can walk over a set of arrays with nothing but loads and stores.
//
// A kernel that reads and writes so many bytes per element cannot be faster than the best of these walks over the same
// arrays, so `benchmarks.adam` measures them in the same run. limit.py calls this by ctypes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace superoffload::memory_limit {

enum Access : int { read, write, update };

// Names one array and its access. An update stores what it loaded, so walks over live state leave it as it was; a write
// stores zeros.
struct Stream {
    std::uint8_t* base;
    std::size_t element_size;
    Access access;
};

}  // namespace superoffload::memory_limit

extern "C" {

// Names the loops by the width of their vectors, narrowest first (the first ones run on every processor); null behind
// the last.
const char* loops_name(std::size_t index);

// Returns the seconds of `repeats` walks over elements [0, numel) of all streams by one thread per entry of `cpus`
// (below 0: not bound to a processor), from their common start to the last end; below 0 if the system has no more
// threads. Starting the threads is not counted. `block`: elements of one stream before the next stream's turn.
// Streaming stores bypass the caches, for arrays that are only written.
double walk(const superoffload::memory_limit::Stream* streams, std::size_t count, std::size_t numel, std::size_t block,
            const char* loops, int streaming_stores, const int* cpus, std::size_t threads, int repeats);
}
