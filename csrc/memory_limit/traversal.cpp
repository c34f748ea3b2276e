#include "traversal.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "../runtime/completion.h"
#include "loops.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace superoffload::memory_limit {
namespace {

constexpr std::size_t kLargestChunk = 64 * 1024;  // elements; the worker threads take as many at a time
constexpr std::size_t kSmallestChunk = 64;        // a whole cache line of every stream

const Loops& loops_named(const std::string& name) {
    NamedLoops found[4];
    const std::size_t count = supported_loops(found);
    std::string names;
    for (std::size_t i = 0; i < count; ++i) {
        if (name == found[i].name) return *found[i].loops;
        names += (i == 0 ? "" : ", ") + std::string(found[i].name);
    }
    throw std::invalid_argument("loops: \"" + name + "\", expected one of " + names);
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
    Walk(const std::vector<Stream>& streams, std::size_t numel, const Way& way, std::size_t threads, int repeats)
        : streams_(streams),
          numel_(numel),
          block_(way.block),
          loops_(loops_named(way.loops)),
          streaming_(way.streaming_stores),
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
            case Access::read:
                loops_.read(base, bytes);
                break;
            case Access::update:
                loops_.update(base, bytes, zero);
                break;
            case Access::write:
                if (streaming_ && reinterpret_cast<std::uintptr_t>(base) % loops_.width == 0) {
                    loops_.write_streaming(base, bytes, zero);
                } else {
                    loops_.write(base, bytes, zero);
                }
                break;
        }
    }

    const std::vector<Stream>& streams_;
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

std::vector<std::string> available_loops() {
    NamedLoops found[4];
    const std::size_t count = supported_loops(found);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count; ++i) names.emplace_back(found[i].name);
    return names;
}

double walk(const std::vector<Stream>& streams, std::size_t numel, const Way& way, const std::vector<int>& cpus,
            int repeats) {
    if (cpus.empty()) throw std::invalid_argument("cpus: empty, expected one entry per thread");
    if (repeats < 1) throw std::invalid_argument("repeats: " + std::to_string(repeats) + ", expected at least 1");
    if (way.block < 1) throw std::invalid_argument("block: 0, expected at least 1 element");
    Walk shared(streams, numel, way, cpus.size(), repeats);
    std::atomic<Signal> signal{Signal::wait};
    std::atomic<std::size_t> ready{0};
    std::vector<double> ends(cpus.size(), 0);
    std::vector<std::thread> threads;
    const auto join = [&] {
        for (std::thread& thread : threads) thread.join();
    };
    try {
        for (std::size_t i = 0; i < cpus.size(); ++i) {
            threads.emplace_back([&, i] {
                bind_to(cpus[i]);
                ready.fetch_add(1);
                while (signal.load(std::memory_order_acquire) == Signal::wait) {
                }
                if (signal.load() == Signal::give_up) return;
                shared.run(i);
                ends[i] = now_seconds();
            });
        }
    } catch (...) {  // the system has no more threads
        signal.store(Signal::give_up);
        join();
        throw;
    }
    while (ready.load() < cpus.size()) std::this_thread::yield();
    const double began = now_seconds();
    signal.store(Signal::go, std::memory_order_release);
    join();
    return *std::max_element(ends.begin(), ends.end()) - began;
}

}  // namespace superoffload::memory_limit
