// A word of pinned host memory that the down stream writes a number to behind each copy, so that a thread can see how
// far it is without asking the driver.
#pragma once

#include <atomic>
#include <cstdint>

#include "driver.h"

namespace superoffload::cuda {

class ArrivalFlag {
   public:
    // `word` null: there is none, and events are asked instead.
    ArrivalFlag(const Gpu& gpu, void* word);

    // False once the driver has refused to write it, too.
    bool in_use() const { return in_use_.load(); }
    // Whether the flag will show that `stream` has come to here.
    bool enqueue(const Driver& driver, Stream stream, std::uint32_t sequence);
    // Whether it shows `sequence`, or a later one.
    bool shows(std::uint32_t sequence) const {
        return static_cast<std::int32_t>(word_->load(std::memory_order_acquire) - sequence) >= 0;
    }

   private:
    std::atomic<std::uint32_t>* word_;
    DeviceAddress address_ = 0;
    std::atomic<bool> in_use_;
};

}  // namespace superoffload::cuda
