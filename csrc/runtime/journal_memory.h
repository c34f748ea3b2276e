// Owns the memory that the journals of several buckets share: what one of them does not need, another can use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>

#include "../arm_adam/adam.h"

namespace superoffload {

// Codes and escapes lie one behind another, from the front, in the order in which they come. From the back, the old
// upper halves of split masters lie until their bucket is settled. Each end begins anew once nothing there is held.
//
// Memory that was never used has no pages. What journals need beyond `kept` bytes goes back to the system when the last
// kQuietSteps of them did without it. The methods may be called from several threads.
class JournalMemory {
   public:
    static constexpr int kQuietSteps = 16;

    JournalMemory(std::uint64_t bytes, std::uint64_t kept);
    JournalMemory(const JournalMemory&) = delete;
    JournalMemory& operator=(const JournalMemory&) = delete;

    // Gives room for codes, for a journaled step that begins now; its escapes follow in arena(). Null: there is none.
    std::uint8_t* take_codes(std::uint64_t bytes);
    // The journaled step of such codes has ended: nothing appends escapes to it any more.
    void written();
    // Codes and their escapes are not needed any more.
    void release_codes();

    // Gives room for upper halves. Null: there is none, or a journaled step is under way.
    std::uint16_t* take_halves(std::uint64_t bytes);
    void release_halves();
    bool has_room_for_halves(std::uint64_t bytes) const;

    // The stepping threads append escapes here.
    adam::JournalArena* arena() { return &arena_; }
    std::uint64_t bytes() const { return bytes_; }
    // Counts the bytes that were used and not given back to the system.
    std::uint64_t held() const;
    // Counts the buckets that have codes or halves here.
    int users() const;

   private:
    void begin_anew();
    void give_back();
    std::uint64_t used_bytes() const;
    std::uint64_t front_bytes() const { return journals_ == 0 ? 0 : used_bytes(); }
    std::uint64_t back_bytes() const { return halves_ == 0 ? 0 : back_; }
    void end_front();
    bool fits_behind_front(std::uint64_t bytes) const;
    std::uint64_t back_begin() const;

    struct FreeAligned {
        void operator()(std::uint8_t* memory) const { ::operator delete(memory, kJournalAlign); }
    };
    static constexpr std::align_val_t kJournalAlign{64};  // aligned, so whole lines can bypass the caches

    const std::uint64_t bytes_;
    const std::uint64_t kept_;
    std::unique_ptr<std::uint8_t, FreeAligned> memory_;
    adam::JournalArena arena_{nullptr, 0, 0};

    // A forked child has one thread, and may never take the lock: a thread of its parent may have had it.
    std::unique_lock<std::mutex> lock() const;

    mutable std::mutex mutex_;
    const long creator_;
    int journals_ = 0;        // buckets that may still be undone or replayed
    int writing_ = 0;         // of these, buckets whose journaled step has not ended
    int halves_ = 0;          // buckets that are published and not settled
    std::uint64_t back_ = 0;  // bytes of halves
    std::uint64_t front_touched_ = 0;
    std::uint64_t back_touched_ = 0;
    int quiet_steps_ = 0;
};

}  // namespace superoffload
