// This is the public interface of the Adam kernels.
//
// One plain struct describes a contiguous run of a bucket. The functions below work on a range of its elements, so
// several threads can share one bucket. No Python, torch or CUDA type appears here. docs/kernel.md has the arithmetic
// and the journal format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace superoffload::adam {

// Counts the elements per block, the unit of the norm's partial sums and of the journal. Ranges start at a multiple.
constexpr std::size_t kBlock = 1024;

// Counts the elements of a shard whose 8-bit moments share a scale.
constexpr std::size_t kMomentBlock = 256;

// q8 is for moments only: 8-bit codes with a scale per kMomentBlock elements.
enum class ElementType : std::uint8_t { f32 = 0, bf16 = 1, f16 = 2, q8 = 3 };

constexpr std::size_t element_size(ElementType type) {
    return type == ElementType::f32 ? 4 : type == ElementType::q8 ? 1 : 2;
}

// Holds the user's settings, in double precision.
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

// Holds what a step freezes: all that the arithmetic and its undo need, each value rounded once from double.
struct Scalars {
    float gradient_factor;
    float beta1, beta1_rest, one_minus_beta1, inverse_beta1;  // beta1 + beta1_rest: beta1 to twice as many bits
    float beta2, one_minus_beta2, inverse_beta2;
    float eps, step_size, inverse_sqrt_bias2;
    float decay, inverse_decay, weight_decay;
    bool l2;
    std::uint32_t noise_key;  // keys the stochastic rounding of bf16 and 8-bit moments: seed, parameter and step
};

// Rounds the scalars of a step. `noise_stream` stands for seed and parameter.
Scalars freeze(const Hyper& hyper, std::uint64_t noise_stream = 0);

// Locates one block's escapes (old words whose code does not fit). `offset` counts 4-byte words in the arena.
struct JournalBlock {
    static constexpr std::uint32_t kNotApplied = 0xffffffffu;
    std::uint32_t offset;
    std::uint16_t escapes[3];                       // exp_avg, exp_avg_sq, master
    std::uint16_t narrow_escapes;                   // escapes that one-byte codes would have, all components together
    std::uint8_t scales[2][kBlock / kMomentBlock];  // of 8-bit moments before the step: exp_avg, exp_avg_sq
};

// Holds the escapes of all runs of a bucket. The stepping threads advance `used` atomically.
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

// Describes the elements that follow one another in a shard: `length` of them, `stride` apart in the whole parameter.
struct Axis {
    std::uint64_t length;
    std::uint32_t stride;  // modulo 2^32
};
constexpr std::size_t kMaxAxes = 6;

// Describes a contiguous run of a bucket. Master, moments, gradient, shadow and journal never overlap.
//
// A split master is stored in two halves of 16 bits: the shadow has the upper one, rounded to nearest, ties away from
// zero, which is the bf16 published copy; `master` has the signed remainder. Bits = (shadow << 16) + remainder, modulo
// 2^32. The pair and the bits determine each other, ties and NaN (one pattern: remainder 0) included.
struct Run {
    void* master;  // fp32; of a split master the remainders, int16
    void* exp_avg;
    void* exp_avg_sq;
    const void* gradient;
    void* shadow;
    Journal journal;
    std::size_t numel;
    ElementType gradient_type;
    ElementType shadow_type;
    Scalars frozen;
    ElementType state_type = ElementType::f32;  // of the moments: f32, or rounded stochastically: bf16, q8
    std::uint64_t first_index = 0;              // index of the run's first element in its shard
    // The place of an element, its index in the whole parameter modulo 2^32, keys the noise of stochastic rounding. So
    // it does not depend on how ranks share the parameter. The shard's first element is at `start`.
    std::uint32_t start = 0;
    std::uint32_t axis_count = 0;          // 0: the shard is one run of the whole parameter
    Axis axes[kMaxAxes] = {};              // else where its elements lie, the innermost axis first
    const float* places = nullptr;         // bits of a block's places; kernels set it where they need a table
    bool split_master = false;             // the shadow is bf16 and part of the state
    std::uint16_t* kept_halves = nullptr;  // split: publish() keeps the old upper halves here (see step())
    bool past_cache = false;               // shadow and codes bypass the caches, which all runs together exceed
    // Of q8 moments, one for each kMomentBlock elements from the run's first: the biased exponent of the topmost binade
    // (as E8M0, the scale of OCP's Microscaling formats), 255 if all moments of the block are NaN. All 0 at first.
    std::uint8_t* exp_avg_scales = nullptr;
    std::uint8_t* exp_avg_sq_scales = nullptr;

    // Returns the place of an element where there are no axes.
    std::uint32_t place_of(std::size_t i) const { return static_cast<std::uint32_t>(start + first_index + i); }
};

struct Range {
    std::size_t begin;  // a multiple of kBlock
    std::size_t end;
};

// Steps master, moments and shadow. Without a shadow (null) the model computes with the master itself. A split master
// without a shadow takes its old upper halves from `kept_halves`, because publish() has written the new ones.
void step(const Run& run, Range range);

// Steps and writes the journal that undoes it. False: the arena was full; blocks of the range that found room are
// journaled and can be undone, the others are unchanged.
bool step_journaled(const Run& run, Range range);

// Restores every journaled block of the range to its old bits. run.frozen must be the scalars of the journaled step.
void undo(const Run& run, Range range);

// Undoes with `run.frozen`, then steps with `scalars`, in one pass over memory.
void replay(const Run& run, Range range, const Scalars& scalars);

// Writes only the shadow of a step, with the bits that the full pass will give. Of a split master it first copies the
// shadow to `kept_halves`, from which the step behind it reads.
void publish(const Run& run, Range range);

// Sums the squares of blocks of kBlock elements in fp64; +inf where any element is not finite.
void sum_of_squares(const void* gradient, ElementType type, std::size_t numel, double* block_sums);

// Copies a gradient into its packed place and sums it in the same pass.
void pack(const void* gradient, void* packed, ElementType type, std::size_t numel, double* block_sums);

// Folds one shard's block sums in an order that depends only on their number.
double fold_sums(const double* block_sums, std::size_t count);

// These functions choose among the instruction sets scalar, avx2, avx512, neon, sve.
struct Kernels;
std::size_t available_isas(const char** names, std::size_t capacity);
const char* current_isa();
// Selects an instruction set. False: this build or this processor lacks it.
bool set_isa(const char* name);

}  // namespace superoffload::adam
