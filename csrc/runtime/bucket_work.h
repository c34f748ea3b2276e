// Holds the worker threads' view of a bucket: its runs, cut into chunks, its journal, and the operations.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "../arm_adam/adam.h"

namespace superoffload {

// `settle` is a step that leaves the shadow alone, which `publish` has written.
enum class Operation : std::uint8_t { step, step_journaled, undo, replay, publish, settle };

// Counts the elements of a chunk, which a worker takes at a time. A multiple of adam::kBlock.
constexpr std::size_t kChunk = 64 * adam::kBlock;

struct JournalUse {
    std::uint64_t bytes = 0;  // codes, escapes and block table of the last journaled step
    std::uint64_t escapes[3] = {0, 0, 0};
    std::uint64_t narrow_escapes = 0;  // escapes that one-byte codes would have
};

// Holds a run, and the seed and shard (`noise_stream`) that key the stochastic rounding of bf16 moments.
struct RunOfShard {
    adam::Run run;
    std::uint64_t noise_stream = 0;
};

class BucketWork {
   public:
    // Borrows the runs' memory, which the caller keeps alive. journal_bytes = 0: no journal, so no speculation.
    BucketWork(std::vector<RunOfShard> runs, std::uint64_t journal_bytes);
    BucketWork(const BucketWork&) = delete;
    BucketWork& operator=(const BucketWork&) = delete;

    // Freezes the values of the next step, journaled step, replay, or publish and settle. steps[i] is the step number
    // of run i, or 0 for a run without a gradient, which is left as it is.
    void freeze(const adam::Hyper& hyper, const std::vector<std::uint64_t>& steps);

    // Prepares an operation, once before its chunks; width (1 or 2) matters for step_journaled only.
    void begin(Operation operation, int width);
    void run_chunk(Operation operation, std::size_t chunk);
    // Runs all chunks on the calling thread. False: a journaled step did not fit and was undone.
    bool run_all(Operation operation, int width);

    std::size_t chunks() const { return chunks_.size(); }
    std::size_t numel() const { return numel_; }
    bool overflowed() const { return overflowed_.load(std::memory_order_acquire); }
    std::uint64_t journal_capacity() const { return journal_bytes_; }
    bool width_fits(int width) const { return static_cast<std::uint64_t>(width) * padded_ <= journal_bytes_; }
    // Tells whether publish and settle are possible: between them the journal, which is not in use then, keeps the old
    // upper halves of split masters.
    bool publishes() const { return !has_split_masters_ || width_fits(2); }
    JournalUse journal_use() const;

   private:
    struct Part {
        adam::Run run;       // frozen: the scalars of the last step or journaled step
        adam::Scalars next;  // frozen by freeze(), not yet used
        std::uint64_t noise_stream;
        bool present;              // has a gradient, by freeze()
        bool journaled;            // was part of the journaled step
        std::uint64_t code_start;  // in elements, within the bucket's codes
        std::uint64_t block_start;
    };
    struct Chunk {
        std::size_t part;
        adam::Range range;
    };

    void begin_journal(int width);
    void begin_publish();

    std::vector<Part> parts_;
    std::vector<Chunk> chunks_;
    std::size_t numel_ = 0;
    std::uint64_t padded_ = 0;  // elements, each run rounded up so that codes stay aligned
    bool has_split_masters_ = false;
    bool keeps_halves_ = false;  // the journal's memory has them, from a publish to the next journaled step
    std::uint64_t journal_bytes_;
    struct FreeAligned {
        void operator()(std::uint32_t* words) const { ::operator delete(words, kJournalAlign); }
    };
    static constexpr std::align_val_t kJournalAlign{64};  // aligned, so whole lines can bypass the caches
    std::unique_ptr<std::uint32_t, FreeAligned> journal_;
    std::vector<adam::JournalBlock> blocks_;
    adam::JournalArena arena_{nullptr, 0, 0};
    int width_ = 0;
    std::atomic<bool> overflowed_{false};
};

}  // namespace superoffload
