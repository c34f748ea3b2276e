#include "journal_memory.h"

#include <algorithm>

#include <unistd.h>

#include "huge_pages.h"

namespace superoffload {
namespace {

constexpr std::uint64_t kLine = 64;

std::uint64_t round_up(std::uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

JournalMemory::JournalMemory(std::uint64_t bytes, std::uint64_t kept)
    : bytes_(bytes), kept_(kept), creator_(static_cast<long>(getpid())) {
    if (bytes_ == 0) return;
    memory_.reset(static_cast<std::uint8_t*>(::operator new(round_up(bytes_), kJournalAlign)));
    prefer_huge_pages(memory_.get(), bytes_);
    arena_.words = reinterpret_cast<std::uint32_t*>(memory_.get());
    end_front();
}

std::unique_lock<std::mutex> JournalMemory::lock() const {
    if (static_cast<long>(getpid()) != creator_) return std::unique_lock<std::mutex>(mutex_, std::defer_lock);
    return std::unique_lock<std::mutex>(mutex_);
}

std::uint8_t* JournalMemory::take_codes(std::uint64_t bytes) {
    const auto locked = lock();
    if (journals_ == 0) begin_anew();
    const std::uint64_t words = round_up(bytes) / 4;
    std::uint64_t used = __atomic_load_n(&arena_.used, __ATOMIC_RELAXED);
    std::uint64_t start;
    do {  // the steps of other buckets append escapes meanwhile
        start = round_up(4 * used) / 4;
        if (start + words > arena_.capacity) return nullptr;
    } while (
        !__atomic_compare_exchange_n(&arena_.used, &used, start + words, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    ++journals_;
    ++writing_;
    return memory_.get() + 4 * start;
}

void JournalMemory::written() {
    const auto locked = lock();
    --writing_;
}

void JournalMemory::release_codes() {
    const auto locked = lock();
    --journals_;
}

std::uint16_t* JournalMemory::take_halves(std::uint64_t bytes) {
    const auto locked = lock();
    if (!fits_behind_front(bytes)) return nullptr;
    const std::uint64_t back = back_bytes() + round_up(bytes);
    ++halves_;
    back_ = back;
    back_touched_ = std::max(back_touched_, back);
    end_front();
    return reinterpret_cast<std::uint16_t*>(memory_.get() + back_begin());
}

void JournalMemory::release_halves() {
    const auto locked = lock();
    --halves_;
}

bool JournalMemory::has_room_for_halves(std::uint64_t bytes) const {
    const auto locked = lock();
    return fits_behind_front(bytes);
}

// The halves begin at a line, also where the memory does not end at one.
bool JournalMemory::fits_behind_front(std::uint64_t bytes) const {
    const std::uint64_t lines = bytes_ / kLine * kLine;
    return writing_ == 0 && front_bytes() + back_bytes() + round_up(bytes) <= lines;
}

std::uint64_t JournalMemory::held() const {
    const auto locked = lock();
    return std::min(bytes_, std::max(front_touched_, used_bytes()) + back_touched_);
}

int JournalMemory::users() const {
    const auto locked = lock();
    return journals_ + halves_;
}

std::uint64_t JournalMemory::used_bytes() const {
    return std::min(bytes_, 4 * __atomic_load_n(&arena_.used, __ATOMIC_RELAXED));
}

// Only while no step appends escapes.
void JournalMemory::end_front() {
    // The last block of a full arena may begin where the arena ends, and no offset may be kNotApplied.
    arena_.capacity = std::min<std::uint64_t>(back_begin() / 4, adam::JournalBlock::kNotApplied - 1);
}

std::uint64_t JournalMemory::back_begin() const { return halves_ == 0 ? bytes_ : bytes_ / kLine * kLine - back_; }

void JournalMemory::begin_anew() {
    const std::uint64_t used = used_bytes();
    front_touched_ = std::max(front_touched_, used);
    quiet_steps_ = used <= kept_ && halves_ == 0 ? quiet_steps_ + 1 : 0;
    if (quiet_steps_ >= kQuietSteps && front_touched_ + back_touched_ > kept_) give_back();
    arena_.used = 0;
    end_front();
}

void JournalMemory::give_back() {
    give_back_pages(memory_.get() + kept_, bytes_ - kept_);
    front_touched_ = std::min(front_touched_, kept_);
    back_touched_ = 0;
    quiet_steps_ = 0;
}

}  // namespace superoffload
