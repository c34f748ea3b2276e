// Defines all kernels of the accelerator in one translation unit without system headers, for NVRTC and nvcc.
//
//   pack_GRADIENT(Table<CopyPiece> table, unsigned count, void* packed, double* sums, Sum* bit_sums)
//       gradients -> packed gradient; sums[first_block + k]: sum of squares of block k of the piece, infinite if an
//       element is not finite; bit_sums, unless null: sums of its bits as by sum_bits, one per block, two for fp32
//   unpack_BITS(Table<CopyPiece> table, unsigned count, const void* staged)
//       staged parameters -> parameters, of 16 or 32 bits each
//   step_GRADIENT_PUBLISHED(Table<StepPiece> table, unsigned count)
//       one step of state in device memory; fp32 moments
//   step_GRADIENT_PUBLISHED_noisy(...)
//       the same with bf16 moments, rounded stochastically
//   step_GRADIENT_PUBLISHED_q8(...)
//       the same with 8-bit moments and a scale for every 256 elements
//   step_GRADIENT_split(...), step_GRADIENT_split_noisy(...), step_GRADIENT_split_q8(...)
//       the same with split masters and bf16 parameters
//   sum_bits(Table<SumPiece> table, unsigned count)
//       the bits of any memory -> pieces[...].sums, one for every 2048 bytes
//   compare_bits(Table<SumPiece> table, unsigned count, unsigned char* changed)
//       changed[i] becomes 1 where a sum of pieces[i] differs from the one that was written; others stay as they are
//
// GRADIENT, PUBLISHED: f32, bf16 or f16. pieces.cuh has the pieces and the launch geometry. Compile without
// fused multiply-adds, approximations or flush-to-zero: options.txt.
#include "bit_sums.cuh"
#include "elements.cuh"
#include "moment_blocks.cuh"
#include "pack.cuh"
#include "pieces.cuh"
#include "step.cuh"
#include "unpack.cuh"

#define SUPEROFFLOAD_PACK_KERNELS(X) \
    X(f32, F32)                      \
    X(bf16, Bf16)                    \
    X(f16, F16)

#define SUPEROFFLOAD_UNPACK_KERNELS(X) \
    X(16, unsigned short)              \
    X(32, unsigned)

#define SUPEROFFLOAD_STEP_KERNELS(X) \
    X(f32, F32, f32, F32)            \
    X(bf16, Bf16, bf16, Bf16)        \
    X(f16, F16, f16, F16)            \
    X(f32, F32, bf16, Bf16)          \
    X(f32, F32, f16, F16)

#define SUPEROFFLOAD_SPLIT_STEP_KERNELS(X) \
    X(f32, F32)                            \
    X(bf16, Bf16)

#define SUPEROFFLOAD_KERNEL extern "C" __global__ void __launch_bounds__(superoffload::cuda::kThreads)

#define SUPEROFFLOAD_DEFINE_PACK(gradient, Gradient)                                                         \
    SUPEROFFLOAD_KERNEL pack_##gradient(SUPEROFFLOAD_TABLE(CopyPiece) table, unsigned count, void* packed,   \
                                        double* sums, superoffload::cuda::Sum* bit_sums) {                   \
        superoffload::cuda::pack<superoffload::cuda::Gradient>(table.list(), count, packed, sums, bit_sums); \
    }

#define SUPEROFFLOAD_DEFINE_UNPACK(bits, Word)                                                                   \
    SUPEROFFLOAD_KERNEL unpack_##bits(SUPEROFFLOAD_TABLE(CopyPiece) table, unsigned count, const void* staged) { \
        superoffload::cuda::unpack<Word>(table.list(), count, staged);                                           \
    }

// One kernel for each kind of moments.
#define SUPEROFFLOAD_DEFINE_STEPS(name, Gradient, Published, Masters)                                                 \
    SUPEROFFLOAD_KERNEL name(SUPEROFFLOAD_TABLE(StepPiece) table, unsigned count) {                                   \
        superoffload::cuda::step<superoffload::cuda::Gradient, superoffload::cuda::Published,                         \
                                 superoffload::cuda::ExactMoments, superoffload::cuda::Masters>(table.list(), count); \
    }                                                                                                                 \
    SUPEROFFLOAD_KERNEL name##_noisy(SUPEROFFLOAD_TABLE(StepPiece) table, unsigned count) {                           \
        superoffload::cuda::step<superoffload::cuda::Gradient, superoffload::cuda::Published,                         \
                                 superoffload::cuda::NoisyMoments, superoffload::cuda::Masters>(table.list(), count); \
    }                                                                                                                 \
    SUPEROFFLOAD_KERNEL name##_q8(SUPEROFFLOAD_TABLE(StepPiece) table, unsigned count) {                              \
        superoffload::cuda::step_moment_blocks<superoffload::cuda::Gradient, superoffload::cuda::Published,           \
                                               superoffload::cuda::Masters>(table.list(), count);                     \
    }

#define SUPEROFFLOAD_DEFINE_WHOLE_STEPS(gradient, Gradient, published, Published) \
    SUPEROFFLOAD_DEFINE_STEPS(step_##gradient##_##published, Gradient, Published, WholeMasters)

#define SUPEROFFLOAD_DEFINE_SPLIT_STEPS(gradient, Gradient) \
    SUPEROFFLOAD_DEFINE_STEPS(step_##gradient##_split, Gradient, Bf16, SplitMasters)

SUPEROFFLOAD_PACK_KERNELS(SUPEROFFLOAD_DEFINE_PACK)
SUPEROFFLOAD_UNPACK_KERNELS(SUPEROFFLOAD_DEFINE_UNPACK)
SUPEROFFLOAD_STEP_KERNELS(SUPEROFFLOAD_DEFINE_WHOLE_STEPS)
SUPEROFFLOAD_SPLIT_STEP_KERNELS(SUPEROFFLOAD_DEFINE_SPLIT_STEPS)

SUPEROFFLOAD_KERNEL sum_bits(SUPEROFFLOAD_TABLE(SumPiece) table, unsigned count) {
    superoffload::cuda::sum_or_compare(table.list(), count, nullptr);
}

SUPEROFFLOAD_KERNEL compare_bits(SUPEROFFLOAD_TABLE(SumPiece) table, unsigned count, unsigned char* changed) {
    superoffload::cuda::sum_or_compare(table.list(), count, changed);
}
