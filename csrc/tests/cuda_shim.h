// Lets g++ compile csrc/cuda for this processor: defines the parts of CUDA that the kernels use, and CUDA blocks whose
// threads are fibers. Fibers take turns from barrier to barrier, in an order that changes from block to block, so that
// a missing barrier shows. One OS thread runs a launch; several launches may run on several threads.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__ static thread_local
#define __launch_bounds__(threads)
#define __grid_constant__

struct Dim3 {
    unsigned x = 0;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline thread_local Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

constexpr unsigned kWarp = 32;
constexpr std::size_t kStackBytes = 64 << 10;

// Runs the threads of one CUDA block.
class Block {
   public:
    explicit Block(unsigned threads) : fibers_(threads), stacks_(new char[threads * kStackBytes]) {}

    void run(const std::function<void()>& kernel, bool backwards) {
        kernel_ = &kernel;
        const auto count = static_cast<unsigned>(fibers_.size());
        for (unsigned i = 0; i < count; ++i) start(i);
        unsigned alive = count;
        while (alive != 0) {
            bool moved = false;
            for (unsigned k = 0; k < count; ++k) {
                const unsigned i = backwards ? count - 1 - k : k;
                Fiber& fiber = fibers_[i];
                if (fiber.ended || (fiber.waits_for != 0 && !may_pass(i))) continue;
                moved = true;
                resume(i);
                if (fiber.ended) --alive;
            }
            if (!moved) fail("threads wait at different barriers");
        }
    }

    // Waits until all running threads of the group (a warp, or the block) have reached this barrier.
    void wait(unsigned group) {
        Fiber& fiber = fibers_[current_];
        fiber.waits_for = group;
        ++fiber.arrivals;
        swapcontext(&fiber.context, &scheduler_);
        fiber.waits_for = 0;
    }

    // Hands the value of each lane to the one whose number differs by the bits of `mask`; a whole warp calls this. The
    // next exchange begins before all lanes have read from this one, so there are places for two.
    unsigned exchange(unsigned value, unsigned mask) {
        Fiber& fiber = fibers_[current_];
        const unsigned place = ++fiber.exchanges % 2;
        fiber.given[place] = value;
        const Fiber& other = fibers_[current_ ^ mask];
        wait(kWarp);
        if (other.exchanges < fiber.exchanges) fail("not all lanes of a warp exchange values");
        return other.given[place];
    }

    static Block*& running() {
        static thread_local Block* block = nullptr;
        return block;
    }

   private:
    struct Fiber {
        ucontext_t context;
        bool ended = false;
        unsigned waits_for = 0;  // number of threads in the group whose barrier it waits at; 0: none
        unsigned arrivals = 0;
        unsigned exchanges = 0;
        unsigned given[2] = {};
    };

    void start(unsigned i) {
        Fiber& fiber = fibers_[i];
        fiber.ended = false;
        fiber.waits_for = fiber.arrivals = fiber.exchanges = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks_.get() + i * kStackBytes;
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = &scheduler_;
        makecontext(&fiber.context, &Block::enter, 0);
    }

    static void enter() {
        Block& block = *running();
        (*block.kernel_)();
        block.fibers_[block.current_].ended = true;
    }

    void resume(unsigned i) {
        current_ = i;
        threadIdx.x = i;
        running() = this;
        swapcontext(&scheduler_, &fibers_[i].context);
    }

    bool may_pass(unsigned i) const {
        const unsigned group = fibers_[i].waits_for;
        const unsigned first = i / group * group;
        for (unsigned k = first; k < first + group && k < fibers_.size(); ++k) {
            const Fiber& other = fibers_[k];
            if (!other.ended && other.arrivals < fibers_[i].arrivals) return false;
        }
        return true;
    }

    [[noreturn]] static void fail(const char* what) {
        std::fprintf(stderr, "emulated kernel: %s\n", what);
        std::abort();
    }

    std::vector<Fiber> fibers_;
    std::unique_ptr<char[]> stacks_;
    ucontext_t scheduler_;
    const std::function<void()>* kernel_ = nullptr;
    unsigned current_ = 0;
};

inline void launch(unsigned grid, unsigned block, const std::function<void()>& kernel) {
    static thread_local std::unique_ptr<Block> threads;
    static thread_local unsigned size = 0;
    if (size != block) {
        threads = std::make_unique<Block>(block);
        size = block;
    }
    gridDim.x = grid;
    blockDim.x = block;
    for (unsigned i = 0; i < grid; ++i) {
        blockIdx.x = i;
        threads->run(kernel, i % 2 == 1);
    }
}

}  // namespace shim

inline void __syncwarp() { shim::Block::running()->wait(shim::kWarp); }
inline void __syncthreads() { shim::Block::running()->wait(blockDim.x); }
// The mask must name the whole warp.
inline unsigned __shfl_xor_sync(unsigned, unsigned value, int lane_mask) {
    return shim::Block::running()->exchange(value, static_cast<unsigned>(lane_mask));
}

template <typename To, typename From>
inline To shim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned x) { return shim_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return shim_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return shim_bits<double>(x); }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline void __stcg(unsigned* to, unsigned value) { *to = value; }
inline void __stcg(uint2* to, uint2 value) { *to = value; }
inline void __stcg(uint4* to, uint4 value) { *to = value; }

// Compiled with -ffp-contract=off: each function is one operation.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
