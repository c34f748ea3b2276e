// Reports arrivals by a word of pinned host memory. The down stream writes a number to it behind each copy, so that a
// thread sees the stream's progress without asking the driver.
#pragma once

#include <atomic>
#include <cstdint>

#include "driver.h"

namespace superoffload::cuda {

class ArrivalFlag {
   public:
    // Uses `word`; null: there is no flag, and events are queried instead.
    ArrivalFlag(const Gpu& gpu, void* word);

    // Tells whether the flag works; false also once the driver has refused to write it.
    bool in_use() const { return in_use_.load(); }
    // Enqueues the write of `sequence`; returns whether the flag will show that `stream` has come to here.
    bool enqueue(const Driver& driver, Stream stream, std::uint32_t sequence);
    // Tells whether the flag shows `sequence`, or a later one.
    bool shows(std::uint32_t sequence) const {
        return static_cast<std::int32_t>(word_->load(std::memory_order_acquire) - sequence) >= 0;
    }

   private:
    std::atomic<std::uint32_t>* word_;
    DeviceAddress address_ = 0;
    std::atomic<bool> in_use_;
};

}  // namespace superoffload::cuda
