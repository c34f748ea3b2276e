// The Adam kernels: the public interface of csrc/arm_adam.
//
// One plain struct describes a contiguous run of a bucket; the functions below work on a range of its elements, so
// that several threads can share one bucket. No Python, torch or CUDA type appears here. docs/kernel.md has the
// arithmetic and the journal format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace superoffload::adam {

// Elements per block: the unit of the norm's partial sums and of the journal. Ranges start at a multiple of it.
constexpr std::size_t kBlock = 1024;

enum class ElementType : std::uint8_t { f32 = 0, bf16 = 1, f16 = 2 };

constexpr std::size_t element_size(ElementType type) { return type == ElementType::f32 ? 4 : 2; }

// What the user set, in double precision.
struct Hyper {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    std::uint64_t step;      // 1 for the first step
    double gradient_factor;  // unscale x clip
    bool l2;                 // plain Adam (L2 penalty) instead of AdamW
};

// What a step freezes: everything the arithmetic, and later its undo, needs. Each rounded once from double.
struct Scalars {
    float gradient_factor;
    float beta1, beta1_rest, one_minus_beta1, inverse_beta1;  // beta1 + beta1_rest: beta1 to twice as many bits
    float beta2, one_minus_beta2, inverse_beta2;
    float eps, step_size, inverse_sqrt_bias2;
    float decay, inverse_decay, weight_decay;
    bool l2;
    std::uint32_t noise_key;  // of the stochastic rounding of bf16 moments: seed, shard and step
};

// `noise_stream` stands for seed and shard.
Scalars freeze(const Hyper& hyper, std::uint64_t noise_stream = 0);

// Escapes (old words whose code does not fit) of one block. `offset` counts 4-byte words in the arena.
struct JournalBlock {
    static constexpr std::uint32_t kNotApplied = 0xffffffffu;
    std::uint32_t offset;
    std::uint16_t escapes[3];      // exp_avg, exp_avg_sq, master
    std::uint16_t narrow_escapes;  // how many there would be with one-byte codes, all components together
};

// Space for the escapes of all runs of a bucket. `used` is advanced atomically by the stepping threads.
struct JournalArena {
    std::uint32_t* words;
    std::uint64_t capacity;  // in words
    std::uint64_t used;      // in words
};

struct Journal {
    std::uint8_t* codes;   // width bytes per element
    JournalBlock* blocks;  // one per kBlock elements; kNotApplied before a journaled step
    JournalArena* arena;
    std::uint8_t width;  // 1 or 2
};

// A contiguous run of a bucket: master, moments, gradient, shadow and journal never overlap.
struct Run {
    float* master;
    void* exp_avg;
    void* exp_avg_sq;
    const void* gradient;
    void* shadow;
    Journal journal;
    std::size_t numel;
    ElementType gradient_type;
    ElementType shadow_type;
    Scalars frozen;
    ElementType state_type = ElementType::f32;  // of the moments: f32, or bf16 with stochastic rounding
    std::uint64_t first_index = 0;              // of the run in its shard
    bool past_cache = false;  // shadow and codes are stored straight to memory: all of them together exceed the caches

    // What keys an element's noise: its index in the shard, modulo 2^32.
    std::uint32_t index_of(std::size_t i) const { return static_cast<std::uint32_t>(first_index + i); }
};

struct Range {
    std::size_t begin;  // a multiple of kBlock
    std::size_t end;
};

// Master, moments and shadow after one step. Without a shadow (null) the master itself is what the model computes with.
void step(const Run& run, Range range);

// The same, and the journal that undoes it. False: the arena was full; blocks of the range that found room
// are journaled and can be undone, the others are unchanged.
bool step_journaled(const Run& run, Range range);

// Restores every journaled block of the range to its old bits. run.frozen must be the scalars of the journaled step.
void undo(const Run& run, Range range);

// Undo with `run.frozen`, then step with `scalars`, in one pass over memory.
void replay(const Run& run, Range range, const Scalars& scalars);

// Only the shadow of a step, with the bits that the full pass will give.
void publish(const Run& run, Range range);

// Sums of squares over blocks of kBlock elements in fp64; +inf where any element is not finite.
void sum_of_squares(const void* gradient, ElementType type, std::size_t numel, double* block_sums);

// Copies a gradient into its packed place and sums it in the same pass.
void pack(const void* gradient, void* packed, ElementType type, std::size_t numel, double* block_sums);

// The sum of one shard, folded from its block sums in an order that depends on nothing else.
double fold_sums(const double* block_sums, std::size_t count);

// Instruction sets. Names: scalar, avx2, avx512, neon, sve.
struct Kernels;
std::size_t available_isas(const char** names, std::size_t capacity);
const char* current_isa();
// False: not built in, or this processor lacks it.
bool set_isa(const char* name);

}  // namespace superoffload::adam
