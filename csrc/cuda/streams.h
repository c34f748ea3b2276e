// Streams and events: what is enqueued where, and which stream waits for what of another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "driver.h"

namespace superoffload::cuda {

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

struct Streams {
    Stream pack = nullptr;
    Stream down = nullptr;
    Stream up = nullptr;
};

// A pipeline's streams on their device. What is enqueued, on these or on the program's, throws DriverError where the
// driver refuses it; `what` says what it was for. The device's context must be current.
class StreamSet {
   public:
    StreamSet(std::shared_ptr<Gpu> gpu, const Streams& streams) : gpu_(std::move(gpu)), streams_(streams) {}

    const Driver& driver() const { return gpu_->driver(); }
    Stream pack() const { return streams_.pack; }
    Stream down() const { return streams_.down; }
    Stream up() const { return streams_.up; }

    void record(const OwnedEvent& event, Stream stream, const char* what) const;
    // `later` goes on once `event` has happened as it was recorded last.
    void order(Stream later, const OwnedEvent& event, const char* what) const;
    void copy_down(void* target, DeviceAddress source, std::size_t bytes, Stream stream, const char* what) const;
    void copy_up(DeviceAddress target, const void* source, std::size_t bytes, Stream stream, const char* what) const;
    // As the kernels of csrc/cuda/*.cu are launched, with `grid` blocks of CUDA.
    void launch(Function function, std::uint64_t grid, Stream stream, void** arguments, const char* what) const;

    bool idle() const;  // the three of them
    // False when it is `until` on the steady clock and one of the three is still at work.
    bool await_idle(double until) const;

   private:
    std::shared_ptr<Gpu> gpu_;
    Streams streams_;
};

}  // namespace superoffload::cuda
