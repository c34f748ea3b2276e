// Surrounds memory with guard zones. A check finds a write into a zone; AddressSanitizer also finds a read at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace harness {

class Guarded {
   public:
    // Starts `offset` bytes past a 64-byte boundary, so that tests can misalign it.
    explicit Guarded(std::size_t size, std::size_t offset = 0) : size_(size), memory_(2 * kZone + 64 + size, kMark) {
        const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) + kZone;
        begin_ = memory_.data() + kZone + (64 - address % 64) % 64 + offset % 64;
        poison(true);
    }
    ~Guarded() { poison(false); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    template <typename T>
    T* as() {
        return reinterpret_cast<T*>(begin_);
    }
    std::uint8_t* data() { return begin_; }
    std::size_t size() const { return size_; }

    std::vector<std::uint8_t> bytes() const { return {begin_, begin_ + size_}; }
    void assign(const std::vector<std::uint8_t>& bytes) {
        if (!bytes.empty()) std::memcpy(begin_, bytes.data(), bytes.size());
    }

    bool intact() {
        poison(false);
        bool clean = true;
        for (const std::uint8_t* p = memory_.data(); p != memory_.data() + memory_.size(); ++p) {
            if (p == begin_) p += size_;
            if (p == memory_.data() + memory_.size()) break;
            clean = clean && *p == kMark;
        }
        poison(true);
        return clean;
    }

   private:
    static constexpr std::size_t kZone = 256;
    static constexpr std::uint8_t kMark = 0xa5;

    void poison([[maybe_unused]] bool on) {
#if defined(__SANITIZE_ADDRESS__)
        if (on) {
            __asan_poison_memory_region(memory_.data(), static_cast<std::size_t>(begin_ - memory_.data()));
            __asan_poison_memory_region(begin_ + size_,
                                        static_cast<std::size_t>(memory_.data() + memory_.size() - (begin_ + size_)));
        } else {
            __asan_unpoison_memory_region(memory_.data(), memory_.size());
        }
#endif
    }

    std::size_t size_;
    std::vector<std::uint8_t> memory_;
    std::uint8_t* begin_ = nullptr;
};

}  // namespace harness
