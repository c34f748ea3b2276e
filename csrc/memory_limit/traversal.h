// Measures the machine's own limit: how fast threads can walk over a set of arrays with nothing but loads and stores.
//
// A kernel that reads and writes so many bytes per element cannot be faster than the best of these walks over the same
// arrays, so `benchmarks.adam` and `superoffload doctor` measure them in the same run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace superoffload::memory_limit {

enum class Access : std::uint8_t { read, write, update };

// Names one array and its access. An update stores what it loaded, so walks over live state leave it as it was; a write
// stores zeros.
struct Stream {
    std::uint8_t* base;
    std::size_t element_size;
    Access access;
};

// Describes one way to walk; trials find the best one.
struct Way {
    std::size_t block = 256;        // elements of one stream before the next stream's turn
    std::string loops;              // one of available_loops()
    bool streaming_stores = false;  // bypass the caches, for arrays that are only written
};

// Lists loops by the width of their vectors, narrowest first; the first one runs on every processor.
std::vector<std::string> available_loops();

// Returns the seconds of `repeats` walks over elements [0, numel) of all streams by one thread per entry of `cpus`
// (below 0: not bound to a processor), from their common start to the last end. Starting the threads is not counted.
double walk(const std::vector<Stream>& streams, std::size_t numel, const Way& way, const std::vector<int>& cpus,
            int repeats);

}  // namespace superoffload::memory_limit
