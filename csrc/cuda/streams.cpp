#include "streams.h"

#include <chrono>
#include <cstring>
#include <thread>

#include <unistd.h>

#include "../runtime/completion.h"

namespace superoffload::cuda {
namespace {

constexpr unsigned kThreads = 128;  // per CUDA block: launch geometry of csrc/cuda/*.cu (pieces.cuh)

}  // namespace

OwnedEvent::OwnedEvent(std::shared_ptr<Gpu> gpu) : gpu_(std::move(gpu)), creator_(static_cast<long>(getpid())) {
    gpu_->driver().check(gpu_->driver().event_create(&event_, kEventDisableTiming), "cuEventCreate");
}

OwnedEvent::~OwnedEvent() {
    if (creator_ != static_cast<long>(getpid()) || !gpu_->try_push()) return;
    gpu_->driver().event_destroy(event_);
    Context before = nullptr;
    gpu_->driver().context_pop(&before);
}

void StreamSet::record(const OwnedEvent& event, Stream stream, const char* what) const {
    driver().check(driver().event_record(event.get(), stream), what);
}

void StreamSet::order(Stream later, const OwnedEvent& event, const char* what) const {
    driver().check(driver().stream_wait_event(later, event.get(), 0), what);
}

void StreamSet::copy_down(void* target, DeviceAddress source, std::size_t bytes, Stream stream,
                          const char* what) const {
    driver().check(driver().copy_down(target, source, bytes, stream), what);
}

void StreamSet::copy_up(DeviceAddress target, const void* source, std::size_t bytes, Stream stream,
                        const char* what) const {
    driver().check(driver().copy_up(target, source, bytes, stream), what);
}

TableArgument StreamSet::pass(const void* table, std::size_t bytes, DeviceAddress device_table, Stream stream,
                              const char* what) const {
    TableArgument argument;
    if (bytes <= sizeof argument.pieces) {
        std::memcpy(argument.pieces, table, bytes);
    } else {
        copy_up(device_table, table, bytes, stream, what);
        argument.longer = device_table;
    }
    return argument;
}

void StreamSet::launch(Function function, std::uint64_t grid, Stream stream, void** arguments, const char* what) const {
    const auto blocks = static_cast<unsigned>(grid);
    driver().check(driver().launch(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr), what);
}

bool StreamSet::idle() const {
    for (Stream stream : {streams_.pack, streams_.down, streams_.up}) {
        if (driver().stream_query(stream) == kNotReady) return false;
    }
    return true;
}

bool StreamSet::await_idle(double until) const {
    bool is_idle = idle();
    for (; !is_idle && now_seconds() < until; is_idle = idle()) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return is_idle;
}

}  // namespace superoffload::cuda
