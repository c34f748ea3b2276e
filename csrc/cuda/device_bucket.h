// Describes one bucket to the pipeline: the caller's specification, its events, its scratch memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../arm_adam/adam.h"
#include "../runtime/completion.h"
#include "driver.h"
#include "streams.h"

namespace superoffload::cuda {

// Describes a piece to the kernels (csrc/cuda/*.cu); pieces are sorted by first_block.
struct CopyPiece {
    DeviceAddress address;      // of the gradient or the parameter
    unsigned long long offset;  // elements into the packed or staged buffer
    unsigned long long numel;
    unsigned long long first_block;
};

struct PieceSpec {
    std::uint64_t offset = 0;  // elements into the bucket
    std::uint64_t numel = 0;
    double* block_sums = nullptr;  // block sums of the shard, from this piece's first block on
};

struct BucketSpec {
    std::vector<PieceSpec> pieces;
    adam::ElementType gradient_type = adam::ElementType::f32;
    adam::ElementType published_type = adam::ElementType::f32;
    void* packed = nullptr;
    void* shadow = nullptr;
    void* scratch = nullptr;           // scratch_bytes() of host memory, for tables and block sums
    DeviceAddress device_scratch = 0;  // as many on the device
    DeviceAddress resident = 0;        // address of a packed gradient that stays on the device: only its sums go down
    std::string step_kernel;           // the kernel that steps it there
};

std::size_t scratch_bytes(const std::vector<std::uint64_t>& numels);

// Locates the parts of scratch memory, in bytes: the pack kernel's table, the unpack kernel's table, the block sums.
struct Scratch {
    Scratch(std::size_t pieces, std::uint64_t blocks);

    std::size_t down_table = 0;
    std::size_t up_table;
    std::size_t sums;
    std::size_t end;
};

// Tracks new parameters on their way into a bucket's block before the verdict; one object per Pipeline::stage().
class Stage {
   public:
    // Called on the submitter thread: the copy will be enqueued. False: it was withdrawn.
    bool begin() { return move(kWaiting, kSending); }
    void sent() { state_.store(kSent); }
    bool is_sent() const { return state_.load() == kSent; }
    // Withdraws the copy. True: nothing was enqueued, and nothing will be.
    bool withdraw() { return move(kWaiting, kWithdrawn); }

    const std::shared_ptr<Completion> done = std::make_shared<Completion>();  // enqueued, or given up

   private:
    enum State { kWaiting, kSending, kSent, kWithdrawn };
    bool move(State from, State to) { return state_.compare_exchange_strong(from, to); }

    std::atomic<State> state_{kWaiting};
};

// Holds one bucket. The caller owns its memory and keeps it until the pipeline is closed.
struct DeviceBucket {
    DeviceBucket(const std::shared_ptr<Gpu>& gpu, BucketSpec specified);

    // Return addresses on the host and on the device; `at` comes from Scratch.
    char* host_scratch(std::size_t at) const { return static_cast<char*>(spec.scratch) + at; }
    DeviceAddress device_scratch(std::size_t at) const { return spec.device_scratch + at; }

    const BucketSpec spec;
    std::vector<std::uint64_t> blocks;  // number of blocks of each piece
    std::uint64_t all_blocks = 0;
    Function pack = nullptr;    // null: no kernels
    Function unpack = nullptr;  // likewise: copied straight into the parameters
    Function step = nullptr;    // the kernel of a resident bucket
    std::string step_table;     // the step kernel's table; kept until it has been copied
    OwnedEvent ready;           // current stream: the gradients are written
    OwnedEvent packed;          // pack stream: the gradients are read
    OwnedEvent arrived;         // down stream: they are in host memory
    OwnedEvent readers;         // current stream: earlier readers of the old parameters are enqueued
    OwnedEvent staged;          // up stream: the new parameters are in the block
    OwnedEvent delivered;       // up stream: the parameters are new
    OwnedEvent stepped;         // current stream: the step has read its table and all its inputs
    std::atomic<bool> was_delivered{false};
    std::shared_ptr<Completion> arrival;  // completion of the last pack
    bool half_packed = false;             // a call has failed, but some of its work may be under way
    // Holds the bucket's own device memory for one step (0: none): first for the packed gradient on its way down, and
    // once that has arrived for the new parameters.
    DeviceAddress block = 0;
    std::shared_ptr<Stage> stage;  // of the last speculated step; null: none, or it is being delivered
    Scratch scratch;
};

}  // namespace superoffload::cuda
