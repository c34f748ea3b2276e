// From a bucket's shadow in host memory to the parameters on the device: the up stream, and the thread that enqueues
// each copy once the workers have stepped its bucket.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "closing.h"
#include "device_bucket.h"
#include "follower.h"
#include "streams.h"

namespace superoffload::cuda {

class ParametersUp {
   public:
    ParametersUp(const std::shared_ptr<Gpu>& gpu, const StreamSet& streams, const Closing& closing);

    // Room for one shadow on the device.
    void set_staging(DeviceAddress address) { staging_ = address; }
    // As Pipeline::deliver says. The device's context must be current.
    std::shared_ptr<Completion> deliver(const std::shared_ptr<DeviceBucket>& bucket, std::shared_ptr<Completion> after,
                                        Stream current, const std::vector<DeviceAddress>& addresses);
    // Why parameters on the device are not those of the last step; empty: they are.
    std::string failure() const;

    bool await_idle(double until) { return submitter_.await_idle(until); }
    void end() { submitter_.end(); }
    void join() { submitter_.join(); }

   private:
    struct Job {
        std::shared_ptr<DeviceBucket> bucket;
        std::shared_ptr<Completion> after;
        std::shared_ptr<Completion> done;
        std::vector<DeviceAddress> addresses;
    };

    // All on the submitter thread.
    std::string work(const Job& job);
    std::string await_step(const Job& job) const;
    void enqueue(const Job& job) const;
    void copy_each(const Job& job) const;
    void copy_together(const Job& job) const;
    void copy(const BucketSpec& spec, std::uint64_t offset, std::uint64_t numel, DeviceAddress target) const;
    void failed(const std::string& error);

    const StreamSet& streams_;
    const Closing& closing_;
    DeviceAddress staging_ = 0;
    mutable std::mutex mutex_;
    std::string failure_;
    Follower<Job> submitter_;
};

}  // namespace superoffload::cuda
