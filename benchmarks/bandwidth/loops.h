// Declares what loops.inl supplies for each vector width.
#pragma once

#include <cstddef>
#include <cstdint>

namespace superoffload::memory_limit {

struct Loops {
    std::size_t width;  // bytes; streaming stores need addresses that are multiples of it
    void (*update)(std::uint8_t* base, std::size_t bytes, std::uint32_t zero);
    void (*read)(const std::uint8_t* base, std::size_t bytes);
    void (*write)(std::uint8_t* base, std::size_t bytes, std::uint32_t zero);
    void (*write_streaming)(std::uint8_t* base, std::size_t bytes, std::uint32_t zero);
};

struct NamedLoops {
    const char* name;
    const Loops* loops;
};

// Fills `found` (room for 4) with the loops that this processor can run, narrowest first; returns how many.
std::size_t supported_loops(NamedLoops* found);

// Makes streaming stores visible to other threads before later stores.
void fence_streaming_stores();

}  // namespace superoffload::memory_limit
