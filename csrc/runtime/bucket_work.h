// Holds the worker threads' view of a bucket: its runs, cut into chunks, its journal, and the operations.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "../arm_adam/adam.h"
#include "journal_memory.h"

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

// Holds a run, and the seed and shard (`noise_stream`) that key the stochastic rounding of bf16 and 8-bit moments.
struct RunOfShard {
    adam::Run run;
    std::uint64_t noise_stream = 0;
};

class BucketWork {
   public:
    // Borrows the runs' memory, which the caller keeps alive. The journal lies in `journal`, beside those of other
    // buckets; null: no journal, so no speculation.
    BucketWork(std::vector<RunOfShard> runs, std::shared_ptr<JournalMemory> journal);
    // With memory of its own.
    BucketWork(std::vector<RunOfShard> runs, std::uint64_t journal_bytes);
    ~BucketWork() { release_journal(); }
    BucketWork(const BucketWork&) = delete;
    BucketWork& operator=(const BucketWork&) = delete;

    // Gives the runs other gradients of the same types, one address each. No operation is running.
    void set_gradients(const std::vector<const void*>& gradients);

    // Freezes the values of the next step, journaled step, replay, or publish and settle. steps[i] is the step number
    // of run i, or 0 for a run without a gradient, which is left as it is.
    void freeze(const adam::Hyper& hyper, const std::vector<std::uint64_t>& steps);

    // Takes room for the codes of the next journaled step, `width` bytes each. False: there is none.
    bool take_journal(int width);
    // Takes room for the old upper halves of split masters, between publish and settle. False: there is none, so the
    // bucket must be stepped in one pass. Whole masters need none.
    bool take_halves();
    // Tells whether take_halves() would succeed now.
    bool publishes() const;
    // Gives up what was taken: a journaled step is kept, or never ran. Undo, replay and settle do so themselves.
    void release_journal();

    // Prepares an operation, once before its chunks, and takes the room that was not taken before; width (1 or 2)
    // matters for step_journaled only. Without room for its codes a journaled step overflows at once.
    void begin(Operation operation, int width);
    void run_chunk(Operation operation, std::size_t chunk);
    // Once after the last chunk; of a journaled step that was taken back, after the last chunk of its undo.
    void end(Operation operation);
    // Runs all chunks on the calling thread. False: a journaled step did not fit and was undone.
    bool run_all(Operation operation, int width);

    std::size_t chunks() const { return chunks_.size(); }
    std::size_t numel() const { return numel_; }
    bool overflowed() const { return overflowed_.load(std::memory_order_acquire); }
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

    // Says what the bucket holds of the journal memory: nothing, codes of a journaled step that has not ended, codes of
    // one that has, or upper halves.
    enum class Held : std::uint8_t { nothing, unwritten, written, halves };

    void begin_journal(int width);
    void begin_publish();

    std::vector<Part> parts_;
    std::vector<Chunk> chunks_;
    std::size_t numel_ = 0;
    std::uint64_t padded_ = 0;  // elements, each run rounded up so that codes stay aligned
    bool has_split_masters_ = false;
    std::shared_ptr<JournalMemory> journal_;
    Held held_ = Held::nothing;
    std::uint8_t* codes_ = nullptr;
    std::uint16_t* halves_ = nullptr;
    std::vector<adam::JournalBlock> blocks_;
    int width_ = 0;
    std::atomic<bool> overflowed_{false};
};

}  // namespace superoffload
