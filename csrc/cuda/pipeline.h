// The way of a bucket to the host and back, without Python in between:
//
//   current stream   ... backward ...|ready                                    |readers ...      waits for "delivered"
//   pack stream                      |pack kernel into a staging slot|packed
//   down stream                                                      |copy|arrived, flag
//   watcher thread                                                                 sees the flag, hands over the sums
//   worker threads                                                                 step the bucket
//   submitter thread                                                               waits for the step, enqueues
//   up stream                                                                          |copy (unpack kernel)|delivered
//
// Every arrow between two streams is an event; docs/pipeline.md has the picture and the reason for each.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../arm_adam/adam.h"
#include "../runtime/completion.h"
#include "driver.h"

namespace superoffload::cuda {

// What the kernels are given per piece (csrc/cuda/*.cu); sorted by first_block.
struct CopyPiece {
    DeviceAddress address;      // of the gradient or the parameter
    unsigned long long offset;  // elements into the packed or staged buffer
    unsigned long long numel;
    unsigned long long first_block;
};

struct PieceSpec {
    std::uint64_t offset = 0;  // elements into the bucket
    std::uint64_t numel = 0;
    double* block_sums = nullptr;  // of the shard, from this piece's first block on
};

struct BucketSpec {
    std::vector<PieceSpec> pieces;
    adam::ElementType gradient_type = adam::ElementType::f32;   // on the device
    adam::ElementType packed_type = adam::ElementType::f32;     // in host memory
    adam::ElementType shadow_type = adam::ElementType::f32;     // in host memory
    adam::ElementType published_type = adam::ElementType::f32;  // on the device
    void* packed = nullptr;
    void* shadow = nullptr;
    void* scratch = nullptr;           // scratch_bytes() of host memory, for tables and block sums
    DeviceAddress device_scratch = 0;  // as many on the device
    bool direct = false;               // the pack kernel stores into host memory, which then must be pinned
    DeviceAddress resident = 0;        // of a packed gradient that stays on the device: only its sums go down
    std::string step_kernel;           // what steps it there
};

std::size_t scratch_bytes(const std::vector<std::uint64_t>& numels);

// Destroyed with its owner; the driver keeps it until what was recorded has happened.
class OwnedEvent {
   public:
    explicit OwnedEvent(std::shared_ptr<Gpu> gpu);
    ~OwnedEvent();
    OwnedEvent(const OwnedEvent&) = delete;
    OwnedEvent& operator=(const OwnedEvent&) = delete;
    Event get() const { return event_; }

   private:
    std::shared_ptr<Gpu> gpu_;
    Event event_ = nullptr;
    long creator_;
};

// One bucket as the pipeline sees it. Its memory is the caller's, who keeps it until the pipeline is closed.
class DeviceBucket {
   public:
    DeviceBucket(const std::shared_ptr<Gpu>& gpu, BucketSpec spec);

   private:
    friend class Pipeline;

    BucketSpec spec_;
    std::vector<std::uint64_t> blocks_;  // of each piece
    std::uint64_t all_blocks_ = 0;
    Function pack_ = nullptr;           // null: no kernels
    Function unpack_ = nullptr;         // null: copied straight into the parameters
    Function step_ = nullptr;           // of a resident bucket
    std::string step_table_;            // what it reads; kept until it has been copied
    DeviceAddress packed_address_ = 0;  // of host memory, as kernels see it (direct)
    DeviceAddress sums_address_ = 0;
    OwnedEvent ready_;      // current stream: the gradients are written
    OwnedEvent packed_;     // pack stream: the gradients are read
    OwnedEvent arrived_;    // down stream: they are in host memory
    OwnedEvent readers_;    // current stream: whatever reads the old parameters was enqueued before
    OwnedEvent delivered_;  // up stream: the parameters are new
    OwnedEvent stepped_;    // current stream: a resident bucket's table is read, and all that its step reads
    std::atomic<bool> was_delivered_{false};
    std::shared_ptr<Completion> arrival_;  // of the last pack
    bool half_packed_ = false;             // a pack has failed, but some of it may be under way
};

struct Staging {
    DeviceAddress down = 0;  // slots * slot_bytes on the device
    std::uint64_t slot_bytes = 0;
    unsigned slots = 0;
    DeviceAddress up = 0;  // room for one shadow, where a cast is needed on the way up
};

struct Streams {
    Stream pack = nullptr;
    Stream down = nullptr;
    Stream up = nullptr;
};

class Pipeline {
   public:
    // `flag`: a word of pinned host memory, or null to ask events instead. `image`: the compiled kernels, or empty.
    // `timeout_seconds`: how long a device may take for one bucket, everything before it in its queue included.
    Pipeline(std::shared_ptr<Gpu> gpu, const Streams& streams, void* flag, const std::string& image,
             double timeout_seconds);
    ~Pipeline();
    static std::shared_ptr<Pipeline> create(std::shared_ptr<Gpu> gpu, const Streams& streams, void* flag,
                                            const std::string& image, double timeout_seconds);
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;

    bool has_kernels() const { return module_ != nullptr; }
    // False once the driver has refused to write flags: then arrivals are seen by asking events.
    bool uses_flag() const { return use_flag_.load(); }

    // Staging memory; only while nothing is under way (drain()).
    void set_staging(const Staging& staging);
    std::shared_ptr<DeviceBucket> make_bucket(const BucketSpec& spec);

    // Packs the gradients at `addresses`, one per piece (0: this piece is left as it is). Done once packed gradient and
    // block sums are in host memory. `keep`: the gradients may be written again on `current`, which then waits until
    // they are read; else whoever frees their memory must respect the pack stream. `others`: streams besides `current`
    // that gradients were written on.
    std::shared_ptr<Completion> pack(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                                     const std::vector<DeviceAddress>& addresses, bool keep,
                                     const std::vector<Stream>& others = {});
    // Copies the shadow to the parameters at `addresses` (0: not this piece) once `after` has ended and what was
    // enqueued on `current` so far has run. Done once the copy is enqueued.
    std::shared_ptr<Completion> deliver(const std::shared_ptr<DeviceBucket>& bucket, std::shared_ptr<Completion> after,
                                        Stream current, const std::vector<DeviceAddress>& addresses);
    // What is enqueued on `current` from here on reads what the last delivery copied.
    void make_visible(const std::shared_ptr<DeviceBucket>& bucket, Stream current);

    // Steps a resident bucket whose gradient has arrived, and writes its parameters, in the order of `current`.
    // `table`: `count` structs StepPiece of csrc/cuda/step.cuh with `blocks` blocks, copied to `device_table` before.
    // Throws where nothing was launched. What it returns, if anything, went wrong behind the launch.
    std::string step(const std::shared_ptr<DeviceBucket>& bucket, Stream current, std::string table, unsigned count,
                     std::uint64_t blocks, DeviceAddress device_table);
    // Whether the last step of a resident bucket is over, so that its memory may go.
    bool has_stepped(const std::shared_ptr<DeviceBucket>& bucket);

    // True once nothing is under way; false when the time is up.
    bool drain(double timeout_seconds);
    // Ends the threads within about 5 seconds. False: the device is still at work on our memory. Idempotent.
    bool close();

   private:
    struct Ticket {
        std::shared_ptr<DeviceBucket> bucket;
        std::shared_ptr<Completion> done;
        std::uint32_t sequence;
        bool flagged;
        bool summed;  // by the pack kernel
        double since;
        std::vector<std::pair<std::size_t, std::uint64_t>> pieces;  // index, first block
    };
    struct Job {
        std::shared_ptr<DeviceBucket> bucket;
        std::shared_ptr<Completion> after;
        std::shared_ptr<Completion> done;
        std::vector<DeviceAddress> addresses;
    };
    struct Slot {
        explicit Slot(const std::shared_ptr<Gpu>& gpu) : copied(gpu) {}
        OwnedEvent copied;  // down stream: its contents are in host memory
        bool used = false;
    };

    void watch();
    void submit();
    std::string await(const Ticket& ticket) const;
    void hand_over_sums(const Ticket& ticket) const;
    std::string await_step(const Job& job) const;
    void enqueue_up(const Job& job);
    Ticket enqueue_down(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                        const std::vector<DeviceAddress>& addresses, bool keep, const std::vector<Stream>& others);
    std::uint64_t enqueue_pack(DeviceBucket& bucket, const std::vector<DeviceAddress>& addresses, Ticket& ticket,
                               Slot* slot, DeviceAddress target);
    void copy_pieces_down(const DeviceBucket& bucket, const std::vector<DeviceAddress>& addresses,
                          DeviceAddress source);
    bool signal(std::uint32_t sequence);
    void order(Stream later, Event event, const char* what) const;
    Function find(const char* kind, adam::ElementType from, adam::ElementType to) const;
    Function find(const std::string& name) const;
    void launch(Function function, std::uint64_t grid, Stream stream, void** arguments, const char* what) const;
    bool streams_idle() const;
    bool await_idle_streams(double until) const;
    bool out_of_time() const;
    bool forked() const;
    void check_open() const;

    std::shared_ptr<Gpu> gpu_;
    Streams streams_;
    std::atomic<std::uint32_t>* flag_;
    DeviceAddress flag_address_ = 0;
    std::atomic<bool> use_flag_;
    Module module_ = nullptr;
    double timeout_seconds_;
    Staging staging_;
    std::vector<std::unique_ptr<Slot>> slots_;
    std::size_t next_slot_ = 0;
    std::uint32_t sequence_ = 0;
    std::mutex enqueue_mutex_;  // one pack at a time: the order of flags is that of tickets

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Ticket> tickets_;
    std::deque<Job> jobs_;
    std::string broken_;                    // why parameters on the device are not those of the last step
    std::atomic<double> closing_since_{0};  // 0: open
    std::mutex close_mutex_;
    bool idle_at_close_ = false;
    std::thread watcher_;
    std::thread submitter_;
    long creator_;
};

}  // namespace superoffload::cuda
