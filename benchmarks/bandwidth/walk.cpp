// Measures the machine's own limit: how fast threads can walk over a set of arrays with nothing but loads and stores.
//
// A kernel that reads and writes so many bytes per element cannot be faster than the best of these walks over the same
// arrays, so `benchmarks.adam` measures them in the same run. limit.py compiles this for the processor that it runs on,
// and calls it by ctypes.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr std::size_t kWidth = 64;  // bytes of a vector
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr std::size_t kWidth = 32;  // the streaming store of AArch64 takes a pair of registers
#else
constexpr std::size_t kWidth = 16;
#endif
using Vector = std::uint32_t __attribute__((vector_size(kWidth), aligned(1), may_alias));

// Bypasses the caches.
inline void stream(std::uint8_t* to, const Vector& vector) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)(vector));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)(vector));
#elif defined(__x86_64__)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)(vector));
#elif defined(__aarch64__)
    using Half = std::uint32_t __attribute__((vector_size(16)));
    const Half low = {vector[0], vector[1], vector[2], vector[3]};
    const Half high = {vector[4], vector[5], vector[6], vector[7]};
    __asm__ volatile("stnp %q0, %q1, [%2]" : : "w"(low), "w"(high), "r"(to) : "memory");
#else
    *reinterpret_cast<Vector*>(to) = vector;
#endif
}

enum Access : int { read, write, update };

// An update stores what it loaded, so walks over live state leave it as it was; a write stores zeros.
struct Stream {
    std::uint8_t* base;
    std::size_t element_size;
    Access access;
};

constexpr std::size_t kLargestChunk = 64 * 1024;  // elements; the worker threads take as many at a time
constexpr std::size_t kSmallestChunk = 64;        // a whole cache line of every stream

struct Walk {
    const Stream* streams;
    std::size_t count, numel, block;
    bool streaming;
    // The compiler does not know that this is 0, so it can leave out neither loads nor stores.
    std::atomic<std::uint32_t> zero{0};
    std::atomic<std::size_t> next{0};

    // Leaves out what is left of the array's last vector.
    void touch(Access access, std::uint8_t* base, std::size_t bytes) const {
        const std::uint32_t nothing = zero.load(std::memory_order_relaxed);
        const std::size_t whole = bytes / kWidth * kWidth;
        const bool streams_it = streaming && reinterpret_cast<std::uintptr_t>(base) % kWidth == 0;
        const auto at = [base](std::size_t i) -> Vector& { return *reinterpret_cast<Vector*>(base + i); };
        Vector seen = Vector{} ^ nothing;
        if (access == read) {
            for (std::size_t i = 0; i < whole; i += kWidth) seen |= at(i);
            __asm__ volatile("" : : "m"(seen));
        } else if (access == update) {
            for (std::size_t i = 0; i < whole; i += kWidth) at(i) = at(i) ^ nothing;
        } else if (streams_it) {
            for (std::size_t i = 0; i < whole; i += kWidth) stream(base + i, seen);
        } else {
            for (std::size_t i = 0; i < whole; i += kWidth) at(i) = seen;
        }
    }

    void range(std::size_t begin, std::size_t end) const {
        for (std::size_t from = begin; from < end; from += block) {
            const std::size_t elements = std::min(block, end - from);
            for (const Stream* one = streams; one != streams + count; ++one) {
                touch(one->access, one->base + from * one->element_size, elements * one->element_size);
            }
        }
    }

    // Does one thread's part. Threads share a single walk by asking for more, which also balances delayed threads; in
    // repeated walks each thread keeps its own part, which stays in its caches.
    void run(std::size_t thread, std::size_t threads, int repeats) {
        const std::size_t whole = (numel + threads - 1) / threads;
        const std::size_t share = (whole + kSmallestChunk - 1) / kSmallestChunk * kSmallestChunk;
        const std::size_t chunk = std::min(share, kLargestChunk);
        if (repeats == 1) {
            for (std::size_t from; (from = next.fetch_add(chunk)) < numel;) range(from, std::min(from + chunk, numel));
        } else {
            for (int i = 0; i < repeats; ++i)
                range(std::min(thread * share, numel), std::min((thread + 1) * share, numel));
        }
        std::atomic_thread_fence(std::memory_order_seq_cst);
#if defined(__x86_64__)
        _mm_sfence();  // streaming stores come under no other fence
#endif
    }
};

void bind_to(int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // failure is harmless, as for the worker threads
}

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

enum class Signal { wait, go, give_up };

}  // namespace

// Returns the seconds of `repeats` walks over elements [0, numel) of all streams by one thread per entry of `cpus`
// (below 0: not bound to a processor), from their common start to the last end; below 0 if the system has no more
// threads. Starting the threads is not counted. `block`: elements of one stream before the next stream's turn.
extern "C" double walk(const Stream* streams, std::size_t count, std::size_t numel, std::size_t block, int streaming,
                       const int* cpus, std::size_t threads, int repeats) {
    Walk shared{streams, count, numel, block, streaming != 0};
    std::atomic<Signal> signal{Signal::wait};
    std::atomic<std::size_t> ready{0};
    std::vector<double> ends(threads, 0);
    std::vector<std::thread> started;
    double began = -1;
    try {
        for (std::size_t i = 0; i < threads; ++i) {
            started.emplace_back([&, i] {
                bind_to(cpus[i]);
                ready.fetch_add(1);
                while (signal.load(std::memory_order_acquire) == Signal::wait) {
                }
                if (signal.load() == Signal::go) shared.run(i, threads, repeats);
                ends[i] = now_seconds();
            });
        }
        while (ready.load() < threads) std::this_thread::yield();
        began = now_seconds();
        signal.store(Signal::go, std::memory_order_release);
    } catch (const std::system_error&) {  // the system has no more threads
        signal.store(Signal::give_up);
    }
    for (std::thread& thread : started) thread.join();
    return began < 0 ? -1 : *std::max_element(ends.begin(), ends.end()) - began;
}
