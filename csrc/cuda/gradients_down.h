// Moves gradients on the device to a packed gradient in host memory: by the pack and the down stream, staging slots
// between them, and a thread that sees each bucket arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arrival_flag.h"
#include "closing.h"
#include "device_bucket.h"
#include "follower.h"
#include "patience.h"
#include "streams.h"

namespace superoffload::cuda {

class GradientsDown {
   public:
    GradientsDown(std::shared_ptr<Gpu> gpu, const StreamSet& streams, const Closing& closing, void* flag,
                  Patience& patience);

    bool uses_flag() const { return flag_.in_use(); }
    // Sets `slots` slots of `slot_bytes` on the device, from `address` on.
    void set_staging(DeviceAddress address, std::uint64_t slot_bytes, unsigned slots);
    // See Pipeline::pack.
    std::shared_ptr<Completion> pack(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                                     const std::vector<DeviceAddress>& addresses, bool keep,
                                     const std::vector<Stream>& others, DeviceAddress bit_sums);
    // See Pipeline::hold_back. The device's context must be current.
    void hold_back(const DeviceBucket& bucket, Stream stream) const;
    // Waits until `until` (steady clock) for the work of a failed call; false if some is still under way.
    bool await_failed(const DeviceBucket& bucket, double until) const;

    bool await_idle(double until) { return watcher_.await_idle(until); }
    void end() { watcher_.end(); }
    void join() { watcher_.join(); }

   private:
    struct Ticket {
        std::shared_ptr<DeviceBucket> bucket;
        std::shared_ptr<Completion> done;
        std::uint32_t sequence;
        bool flagged;
        bool summed;  // summed by the pack kernel
        double since;
        std::vector<std::pair<std::size_t, std::uint64_t>> pieces;  // index, first block
    };
    struct Slot {
        explicit Slot(const std::shared_ptr<Gpu>& gpu) : copied(gpu) {}
        OwnedEvent copied;  // down stream: its contents are in host memory
        bool used = false;
    };

    Ticket enqueue(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                   const std::vector<DeviceAddress>& addresses, bool keep, const std::vector<Stream>& others,
                   DeviceAddress bit_sums);
    void await_gradients(DeviceBucket& bucket, Stream current, const std::vector<Stream>& others) const;
    // Returns the next slot and, in `target`, its address; null if the bucket has its own memory, then in `target`.
    Slot* next_slot(const DeviceBucket& bucket, DeviceAddress* target);
    // Both work on the pack stream and return the number of blocks.
    std::uint64_t enqueue_kernel(const DeviceBucket& bucket, const std::vector<DeviceAddress>& addresses,
                                 Ticket& ticket, const Slot* slot, DeviceAddress target, DeviceAddress bit_sums) const;
    std::uint64_t enqueue_copies(const DeviceBucket& bucket, const std::vector<DeviceAddress>& addresses,
                                 Ticket& ticket) const;
    void copy_packed(const DeviceBucket& bucket, const std::vector<DeviceAddress>& addresses,
                     DeviceAddress source) const;
    // Both run on the watcher thread.
    std::string await(const Ticket& ticket) const;
    void hand_over_sums(const Ticket& ticket) const;

    std::shared_ptr<Gpu> gpu_;
    const StreamSet& streams_;
    const Closing& closing_;
    ArrivalFlag flag_;
    Patience& patience_;
    DeviceAddress staging_ = 0;
    std::uint64_t slot_bytes_ = 0;
    std::vector<std::unique_ptr<Slot>> slots_;
    std::size_t next_slot_ = 0;
    std::uint32_t sequence_ = 0;
    std::mutex mutex_;  // one pack at a time, so that flags and tickets have one order
    Follower<Ticket> watcher_;
};

}  // namespace superoffload::cuda
