// Moves a bucket to the host and back, without Python in between:
//
//   current stream   ... backward ...|ready                                    |readers ...      waits for "delivered"
//   pack stream                      |pack kernel into a staging slot|packed
//   down stream                                                      |copy|arrived, flag
//   watcher thread                                                                 sees the flag, hands over the sums
//   worker threads                                                                 step the bucket
//   submitter thread                                                               waits for the step, enqueues
//   up stream                                                                          |copy (unpack kernel)|delivered
//
// A bucket that has a block, its own device memory for one step, is packed into that instead of a slot. Once its
// gradient has arrived the block is free for the new parameters, which need not wait for the verdict there:
//
//   worker threads     step the bucket, before the verdict                  commit
//   submitter thread                                      enqueues |                       enqueues
//   up stream                                             |copy into the block|staged      |unpack kernel|delivered
//
// Every arrow between two streams is an event; docs/pipeline.md has the picture and the reason for each.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../arm_adam/adam.h"
#include "../runtime/completion.h"
#include "closing.h"
#include "device_bucket.h"
#include "device_sums.h"
#include "driver.h"
#include "gradients_down.h"
#include "parameters_up.h"
#include "patience.h"
#include "streams.h"

namespace superoffload::cuda {

struct Staging {
    DeviceAddress down = 0;  // slots * slot_bytes on the device
    std::uint64_t slot_bytes = 0;
    unsigned slots = 0;
    DeviceAddress up = 0;  // room for one shadow of several parameters
};

class Pipeline {
   public:
    // Makes a pipeline. `flag`: a word of pinned host memory; null: events are queried instead. `image`: the compiled
    // kernels, or empty. `timeout_seconds`: how long a device may take for one bucket and for its queue before it.
    Pipeline(std::shared_ptr<Gpu> gpu, const Streams& streams, void* flag, const std::string& image,
             double timeout_seconds);
    ~Pipeline();
    static std::shared_ptr<Pipeline> create(std::shared_ptr<Gpu> gpu, const Streams& streams, void* flag,
                                            const std::string& image, double timeout_seconds);
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;

    bool has_kernels() const { return module_ != nullptr; }
    // Tells whether arrivals are seen by a flag; false once the driver has refused to write flags.
    bool uses_flag() const { return gradients_.uses_flag(); }

    // Sets staging memory; only while nothing is under way (drain()).
    void set_staging(const Staging& staging);
    std::shared_ptr<DeviceBucket> make_bucket(const BucketSpec& spec);

    // Packs the gradients at `addresses`, one per piece (0: this piece is left as it is). Done once packed gradient and
    // block sums are in host memory. `others`: streams besides `current` that gradients were written on. `keep`: the
    // gradients' memory may be written again on any of these streams, which then wait until it is read; otherwise the
    // owner must free it behind the pack stream, or call hold_back() before. `block`: the bucket's block, whose memory
    // is free for use behind what was enqueued on `current` so far; 0: it has none. `bit_sums`: room on the device for
    // the sums of the packed bits (bit_sums.cuh), one for each block of the packed pieces in their order, two for fp32.
    // 0: none are wanted.
    std::shared_ptr<Completion> pack(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                                     const std::vector<DeviceAddress>& addresses, bool keep,
                                     const std::vector<Stream>& others = {}, DeviceAddress block = 0,
                                     DeviceAddress bit_sums = 0);
    // Makes later work on `stream` wait until the gradients that were packed last have been read.
    void hold_back(const std::shared_ptr<DeviceBucket>& bucket, Stream stream);
    // Copies the shadow of the pieces that are `present` into the bucket's block once `after` has succeeded; nothing if
    // it fails. A bucket without a block is left alone.
    void stage(const std::shared_ptr<DeviceBucket>& bucket, std::shared_ptr<Completion> after,
               const std::vector<bool>& present);
    // Cancels the copy of stage(): when this returns it neither reads the shadow nor writes the block. Returns whether
    // the copy was made.
    bool unstage(const std::shared_ptr<DeviceBucket>& bucket);
    // Ends the use of the block: later work on `stream` may overwrite it. Must not be called during a delivery.
    void release(const std::shared_ptr<DeviceBucket>& bucket, Stream stream);
    // Returns the bytes of parameters that stage() has brought up.
    std::uint64_t bytes_early() const { return parameters_.bytes_early(); }
    // Copies the shadow, or its staged copy, to the parameters at `addresses` (0: not this piece) once `after` has
    // ended and what was enqueued on `current` so far has run. Done once the copy is enqueued.
    std::shared_ptr<Completion> deliver(const std::shared_ptr<DeviceBucket>& bucket, std::shared_ptr<Completion> after,
                                        Stream current, const std::vector<DeviceAddress>& addresses);
    // Makes later work on `current` read what the last delivery copied.
    void make_visible(const std::shared_ptr<DeviceBucket>& bucket, Stream current);

    // Steps a resident bucket whose gradient has arrived, and writes its parameters, in the order of `current`.
    // `table`: `count` structs StepPiece of csrc/cuda/step.cuh with `blocks` blocks, copied to `device_table` before.
    // Throws if nothing was launched. Returns the error of a call after the launch, or an empty string.
    std::string step(const std::shared_ptr<DeviceBucket>& bucket, Stream current, std::string table, unsigned count,
                     std::uint64_t blocks, DeviceAddress device_table);
    // Tells whether the last step of a resident bucket is over, so that its memory may be freed.
    bool has_stepped(const std::shared_ptr<DeviceBucket>& bucket);

    // Makes a table; `host` and `device` are SumsTable::bytes(runs) of memory each.
    std::shared_ptr<SumsTable> make_sums_table(void* host, DeviceAddress device, std::size_t runs);
    // For these two see DeviceSums; only with kernels.
    void take_sums(SumsTable& table, Stream current, const std::vector<SummedRun>& runs);
    std::vector<bool> compare_sums(SumsTable& table, Stream current, const std::vector<SummedRun>& runs);

    // Waits until nothing is under way; false when the time is up.
    bool drain(double timeout_seconds);
    // Ends the threads within about 5 seconds. False: the device still uses our memory. Idempotent. `keep_kernels`:
    // kernels may still run, on streams of the program.
    bool close(bool keep_kernels = false);

   private:
    Function find(const std::string& name) const;
    bool forked() const;
    void check_open() const;

    std::shared_ptr<Gpu> gpu_;
    StreamSet streams_;
    Closing closing_;
    Patience patience_;
    GradientsDown gradients_;
    ParametersUp parameters_;
    std::optional<DeviceSums> sums_;
    Module module_ = nullptr;
    std::mutex close_mutex_;
    bool closed_ = false;
    bool idle_at_close_ = false;
    long creator_;
};

}  // namespace superoffload::cuda
