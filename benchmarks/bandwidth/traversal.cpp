#include "traversal.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "loops.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace superoffload::memory_limit {
namespace {

constexpr std::size_t kLargestChunk = 64 * 1024;  // elements; the worker threads take as many at a time
constexpr std::size_t kSmallestChunk = 64;        // a whole cache line of every stream

const Loops* loops_named(const char* name) {
    NamedLoops found[4];
    const std::size_t count = supported_loops(found);
    NamedLoops* end = found + count;
    const auto* one = std::find_if(found, end, [&](const NamedLoops& each) { return !std::strcmp(each.name, name); });
    return one == end ? nullptr : one->loops;
}

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void bind_to(int cpu) {
#ifdef __linux__
    if (cpu < 0 || cpu >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // failure is harmless, as for the worker threads
#else
    (void)cpu;
#endif
}

class Walk {
   public:
    Walk(const Stream* streams, std::size_t count, std::size_t numel, std::size_t block, const Loops& loops,
         bool streaming, std::size_t threads, int repeats)
        : streams_(streams, streams + count),
          numel_(numel),
          block_(block),
          loops_(loops),
          streaming_(streaming),
          repeats_(repeats) {
        const std::size_t share = (numel + threads - 1) / threads;
        const std::size_t rounded = (share + kSmallestChunk - 1) / kSmallestChunk * kSmallestChunk;
        chunk_ = std::clamp(rounded, kSmallestChunk, kLargestChunk);
        share_ = rounded;
    }

    // Does one thread's part. Threads share a single walk by asking for more, which also balances delayed threads; in
    // repeated walks each thread keeps its own part, which stays in its caches.
    void run(std::size_t thread) {
        if (repeats_ == 1) {
            for (;;) {
                const std::size_t begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
                if (begin >= numel_) break;
                walk_range(begin, std::min(begin + chunk_, numel_));
            }
        } else {
            const std::size_t begin = std::min(thread * share_, numel_);
            const std::size_t end = std::min(begin + share_, numel_);
            for (int i = 0; i < repeats_; ++i) walk_range(begin, end);
        }
        fence_streaming_stores();
    }

   private:
    void walk_range(std::size_t begin, std::size_t end) {
        for (std::size_t at = begin; at < end; at += block_) {
            const std::size_t count = std::min(block_, end - at);
            for (const Stream& stream : streams_) {
                walk_block(stream, stream.base + at * stream.element_size, count * stream.element_size);
            }
        }
    }

    void walk_block(const Stream& stream, std::uint8_t* base, std::size_t bytes) {
        const std::uint32_t zero = zero_.load(std::memory_order_relaxed);
        switch (stream.access) {
            case read:
                loops_.read(base, bytes);
                break;
            case update:
                loops_.update(base, bytes, zero);
                break;
            case write:
                if (streaming_ && reinterpret_cast<std::uintptr_t>(base) % loops_.width == 0) {
                    loops_.write_streaming(base, bytes, zero);
                } else {
                    loops_.write(base, bytes, zero);
                }
                break;
        }
    }

    const std::vector<Stream> streams_;
    std::size_t numel_;
    std::size_t block_;
    const Loops& loops_;
    bool streaming_;
    int repeats_;
    std::size_t chunk_ = 0;
    std::size_t share_ = 0;
    std::atomic<std::size_t> next_{0};
    std::atomic<std::uint32_t> zero_{0};
};

enum class Signal { wait, go, give_up };

}  // namespace

extern "C" const char* loops_name(std::size_t index) {
    NamedLoops found[4];
    return index < supported_loops(found) ? found[index].name : nullptr;
}

extern "C" double walk(const Stream* streams, std::size_t count, std::size_t numel, std::size_t block,
                       const char* loops, int streaming_stores, const int* cpus, std::size_t threads, int repeats) {
    const Loops* chosen = loops_named(loops);
    if (chosen == nullptr) return -1;
    Walk shared(streams, count, numel, block, *chosen, streaming_stores != 0, threads, repeats);
    std::atomic<Signal> signal{Signal::wait};
    std::atomic<std::size_t> ready{0};
    std::vector<double> ends(threads, 0);
    std::vector<std::thread> started;
    const auto join = [&] {
        for (std::thread& thread : started) thread.join();
    };
    try {
        for (std::size_t i = 0; i < threads; ++i) {
            started.emplace_back([&, i] {
                bind_to(cpus[i]);
                ready.fetch_add(1);
                while (signal.load(std::memory_order_acquire) == Signal::wait) {
                }
                if (signal.load() == Signal::give_up) return;
                shared.run(i);
                ends[i] = now_seconds();
            });
        }
    } catch (const std::system_error&) {  // the system has no more threads
        signal.store(Signal::give_up);
        join();
        return -1;
    }
    while (ready.load() < threads) std::this_thread::yield();
    const double began = now_seconds();
    signal.store(Signal::go, std::memory_order_release);
    join();
    return *std::max_element(ends.begin(), ends.end()) - began;
}

}  // namespace superoffload::memory_limit
