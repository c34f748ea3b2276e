// Lets tests control the fake driver (fake_cuda.cpp): delays, errors, work of their own on streams, counts.
#include <chrono>
#include <cstring>

#include "fake_device.h"

using namespace fake;

// Delays every operation on a stream by up to so many microseconds, from this seed on.
EXPORT void fake_cuda_delays(std::uint64_t seed, double microseconds) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.random.seed(seed);
    w.longest_delay = 1e-6 * microseconds;
}

// Resets the device: no delays, no errors. Memory and streams stay.
EXPORT void fake_cuda_reset() {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.longest_delay = 0;
    w.failures.clear();
    w.calls.clear();
    w.dropped.clear();
    w.registrable = SIZE_MAX;
    w.broken.store(kSuccess);
    w.writes_values.store(true);
    w.mismatches.store(0);
}

// Makes the call of `symbol` after `calls` more of them return `result`.
EXPORT void fake_cuda_fail(const char* symbol, int calls, Result result) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.failures[symbol] = {calls, result};
}

// Breaks the device as a failed kernel does: enqueued work never runs, and every call returns `result`.
EXPORT void fake_cuda_break(Result result) { world().broken.store(result); }

EXPORT void fake_cuda_write_values(int supported) { world().writes_values.store(supported != 0); }

EXPORT void fake_cuda_registrable(std::size_t bytes) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.registrable = bytes;
}

// Leaves out waits of `later` for events recorded on `earlier`, a mistake that tests must notice.
EXPORT void fake_cuda_drop_waits(CUstream_st* later, CUstream_st* earlier) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.dropped.insert({later, earlier});
}

EXPORT CUstream_st* fake_cuda_stream() { return new CUstream_st; }
EXPORT void fake_cuda_synchronize(CUstream_st* stream) { stream_of(stream)->synchronize(); }

// Enqueues a model's work on a stream: writes `source`, a copy of which is made now, to `target`.
EXPORT void fake_cuda_write(CUstream_st* stream, void* target, const void* source, std::size_t bytes) {
    const auto* const first = static_cast<const char*>(source);
    std::vector<char> copy(first, first + bytes);
    stream_of(stream)->enqueue([target, copy] { std::memcpy(target, copy.data(), copy.size()); });
}

// Enqueues a read of `memory`, which must then hold what `source` holds now.
EXPORT void fake_cuda_read(CUstream_st* stream, const void* memory, const void* source, std::size_t bytes) {
    const auto* const first = static_cast<const char*>(source);
    std::vector<char> expected(first, first + bytes);
    stream_of(stream)->enqueue([memory, expected] {
        if (std::memcmp(memory, expected.data(), expected.size()) != 0) ++world().mismatches;
    });
}

EXPORT void fake_cuda_sleep(CUstream_st* stream, double microseconds) {
    stream_of(stream)->enqueue(
        [microseconds] { std::this_thread::sleep_for(std::chrono::duration<double>(1e-6 * microseconds)); });
}

EXPORT long fake_cuda_mismatches() { return world().mismatches.load(); }

// Counts the calls of a driver function, or the launches of a kernel.
EXPORT long fake_cuda_calls(const char* symbol) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    return w.calls[symbol];
}

EXPORT std::size_t fake_cuda_registered_bytes() {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    std::size_t bytes = 0;
    for (const auto& [start, length] : w.registered) bytes += length;
    return bytes;
}
