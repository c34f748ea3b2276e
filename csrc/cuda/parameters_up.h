// Moves a bucket's shadow in host memory to the parameters on the device: by the up stream, and a thread that enqueues
// each copy once the workers have stepped its bucket. Speculated parameters go up before the verdict, as far as the
// bucket's block, which has no reader before the delivery.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "closing.h"
#include "device_bucket.h"
#include "follower.h"
#include "patience.h"
#include "streams.h"

namespace superoffload::cuda {

class ParametersUp {
   public:
    ParametersUp(const std::shared_ptr<Gpu>& gpu, const StreamSet& streams, const Closing& closing, Patience& patience);

    // Sets room for one shadow on the device, for buckets without a block.
    void set_staging(DeviceAddress address) { staging_ = address; }
    // For these three see Pipeline. The device's context must be current.
    void stage(const std::shared_ptr<DeviceBucket>& bucket, std::shared_ptr<Completion> after,
               const std::vector<bool>& present);
    bool unstage(DeviceBucket& bucket);
    std::shared_ptr<Completion> deliver(const std::shared_ptr<DeviceBucket>& bucket, std::shared_ptr<Completion> after,
                                        Stream current, const std::vector<DeviceAddress>& addresses);
    std::uint64_t bytes_early() const { return bytes_early_.load(); }
    // Returns why parameters on the device are not those of the last step; empty if they are.
    std::string failure() const;

    bool await_idle(double until) { return submitter_.await_idle(until); }
    void end() { submitter_.end(); }
    void join() { submitter_.join(); }

   private:
    struct Job {
        std::shared_ptr<DeviceBucket> bucket;
        std::shared_ptr<Completion> after;
        std::shared_ptr<Completion> done;
        std::vector<DeviceAddress> addresses;  // empty: this is a stage
        DeviceAddress block;                   // 0: none
        std::shared_ptr<Stage> stage;          // this stage, or the one that has brought the parameters into the block
        std::vector<bool> present;             // the pieces of a stage
    };

    // All of these run on the submitter thread.
    std::string work(const Job& job);
    std::string await_step(const Job& job) const;
    std::string send_early(const Job& job);
    void enqueue(const Job& job) const;
    void copy_each(const Job& job) const;
    void copy_together(const Job& job) const;
    void copy(const BucketSpec& spec, std::uint64_t offset, std::uint64_t numel, DeviceAddress target) const;
    void await_readers(const DeviceBucket& bucket) const;
    void failed(const std::string& error);

    const StreamSet& streams_;
    const Closing& closing_;
    Patience& patience_;
    DeviceAddress staging_ = 0;
    std::atomic<std::uint64_t> bytes_early_{0};
    mutable std::mutex mutex_;
    std::string failure_;
    Follower<Job> submitter_;
};

}  // namespace superoffload::cuda
