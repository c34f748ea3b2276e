// Allocates large host memory that a device copies from and to: on the right NUMA node, on huge pages, touched by
// several threads, and registered with the driver at construction. Nothing is rounded up to powers of two.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "driver.h"

namespace superoffload::cuda {

struct PinnedRequest {
    std::size_t bytes = 0;
    int node = -1;                             // NUMA node, < 0: any
    bool strict = false;                       // only that node; otherwise others once it is full
    unsigned threads = 1;                      // threads that touch it first
    std::size_t chunk = std::size_t{1} << 36;  // bytes per registration: some drivers fail at hundreds of GiB at once
};

class PinnedMemory {
   public:
    // Throws std::bad_alloc if there is no memory. Memory that cannot be registered stays ordinary memory, and
    // refusal() says why.
    PinnedMemory(std::shared_ptr<Gpu> gpu, const PinnedRequest& request);
    ~PinnedMemory();
    PinnedMemory(const PinnedMemory&) = delete;
    PinnedMemory& operator=(const PinnedMemory&) = delete;

    void* data() const { return data_; }
    std::size_t bytes() const { return request_.bytes; }
    // Returns a length; no copy may cross a multiple of it, counted from data().
    std::size_t chunk() const { return request_.chunk; }
    bool pinned() const { return registered_ > 0; }
    const std::string& refusal() const { return refusal_; }

    // Ends the registration; the memory stays until destruction. Idempotent.
    void unpin();
    // Keeps the memory for ever, since a device may still write to it.
    void leak() { leaked_ = true; }

   private:
    void place();
    void touch();
    void pin();

    std::shared_ptr<Gpu> gpu_;
    PinnedRequest request_;
    void* data_ = nullptr;
    std::size_t mapped_ = 0;
    std::size_t registered_ = 0;  // bytes
    bool leaked_ = false;
    std::string refusal_;
    long creator_;
};

}  // namespace superoffload::cuda
