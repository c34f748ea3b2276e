// Fakes the device of the fake driver (fake_cuda.cpp): streams that are threads, events, and faults for tests.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/driver.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

using superoffload::cuda::DeviceAddress;
using superoffload::cuda::kNotFound;
using superoffload::cuda::kNotReady;
using superoffload::cuda::kNotSupported;
using superoffload::cuda::kOutOfMemory;
using superoffload::cuda::kSuccess;
using superoffload::cuda::Result;

// The pipeline itself never checks for these results.
enum : Result {
    kInvalidValue = 1,
    kInvalidContext = 201,
    kInvalidHandle = 400,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
};

// Identifies one recording of an event, which waits refer to.
struct Recording {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;

    void reach() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            reached = true;
        }
        changed.notify_all();
    }
    bool is_reached() {
        const std::lock_guard<std::mutex> lock(mutex);
        return reached;
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return reached; });
    }
};

}  // namespace fake

struct CUstream_st;
struct CUctx_st {};
struct CUmod_st {};
struct CUfunc_st {
    std::string name;
};
struct CUevent_st {
    std::mutex mutex;
    std::shared_ptr<fake::Recording> last;
    CUstream_st* recorded_on = nullptr;
};

struct CUstream_st {
    CUstream_st() : thread([this] { run(); }) { thread.detach(); }

    // Enqueues an operation. `always`: also on a device that has failed, so that streams become idle there too.
    void enqueue(std::function<void()> operation, bool always = false);
    bool idle() {
        const std::lock_guard<std::mutex> lock(mutex);
        return queue.empty();
    }
    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return queue.empty(); });
    }
    void run();

    std::mutex mutex;
    std::condition_variable changed;
    struct Operation {
        double delay;
        bool always;
        std::function<void()> run;
    };
    std::deque<Operation> queue;  // the front one is running
    std::thread thread;
};

namespace fake {

// Holds the fake's state. It is never destroyed: the threads of streams outlive main().
struct World {
    std::mutex mutex;
    std::mt19937_64 random{1};
    double longest_delay = 0;                                // seconds
    std::map<std::string, std::pair<int, Result>> failures;  // symbol -> calls until it fails
    std::map<std::string, long> calls;
    std::set<std::pair<CUstream_st*, CUstream_st*>> dropped;  // (waiting stream, stream of the event)
    std::map<char*, std::size_t> registered;
    std::size_t registrable = SIZE_MAX;
    std::atomic<Result> broken{kSuccess};  // as after a kernel that failed: no operation runs any more
    std::atomic<bool> writes_values{true};
    std::atomic<long> mismatches{0};
    CUctx_st context;
    CUmod_st module;
    std::set<CUfunc_st*> functions;
    std::set<CUevent_st*> events;
    CUstream_st* legacy = nullptr;
};

World& world();

// Returns this thread's contexts, the current one last.
std::vector<CUctx_st*>& contexts();

// Begins every function: returns a fault that a test has set, or the error of a device that has failed.
Result enter(const char* symbol, bool needs_context = true);

bool is_event(CUevent_st* event);
// Returns the legacy stream for null.
CUstream_st* stream_of(CUstream_st* stream);
// Tells whether the memory lies within one registration; `any`: whether it touches one at all.
bool in_registration(const void* memory, std::size_t bytes, bool* any);

}  // namespace fake
