// Wraps streams and events: enqueues work, and makes one stream wait for another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "driver.h"

namespace superoffload::cuda {

// Owns an event. The driver keeps a destroyed event until its recording has happened.
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

// Passes a list of pieces to a kernel (struct Table of pieces.cuh).
struct TableArgument {
    DeviceAddress longer = 0;
    char pieces[4000] = {};
};

struct Streams {
    Stream pack = nullptr;
    Stream down = nullptr;
    Stream up = nullptr;
};

// Enqueues work on a pipeline's streams or the program's; throws DriverError if the driver refuses it, where `what`
// names the work. The device's context must be current.
class StreamSet {
   public:
    StreamSet(std::shared_ptr<Gpu> gpu, const Streams& streams) : gpu_(std::move(gpu)), streams_(streams) {}

    const Driver& driver() const { return gpu_->driver(); }
    Stream pack() const { return streams_.pack; }
    Stream down() const { return streams_.down; }
    Stream up() const { return streams_.up; }

    void record(const OwnedEvent& event, Stream stream, const char* what) const;
    // Makes `later` wait for the last recording of `event`.
    void order(Stream later, const OwnedEvent& event, const char* what) const;
    void copy_down(void* target, DeviceAddress source, std::size_t bytes, Stream stream, const char* what) const;
    void copy_up(DeviceAddress target, const void* source, std::size_t bytes, Stream stream, const char* what) const;
    // Returns a table as an argument of launches on `stream`. What is too long for it is copied to `device_table`,
    // behind uploads that are under way.
    TableArgument pass(const void* table, std::size_t bytes, DeviceAddress device_table, Stream stream,
                       const char* what) const;
    // Launches a kernel of csrc/cuda/*.cu with `grid` CUDA blocks.
    void launch(Function function, std::uint64_t grid, Stream stream, void** arguments, const char* what) const;

    bool idle() const;  // all three streams
    // Waits until the three streams are idle; false if `until` (steady clock) comes first.
    bool await_idle(double until) const;

   private:
    std::shared_ptr<Gpu> gpu_;
    Streams streams_;
};

}  // namespace superoffload::cuda
