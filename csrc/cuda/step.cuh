// Steps parameters whose master and moments are in the accelerator's memory: operation by operation as
// csrc/arm_adam/arithmetic.inl, with intrinsics that the compiler neither fuses nor reorders, so the bits are the same.
#pragma once

#include "elements.cuh"
#include "pieces.cuh"

namespace superoffload {
namespace cuda {

// Matches csrc/arm_adam/adam.h field by field: the values that a step freezes.
struct Scalars {
    float gradient_factor;
    float beta1, beta1_rest, one_minus_beta1, inverse_beta1;
    float beta2, one_minus_beta2, inverse_beta2;
    float eps, step_size, inverse_sqrt_bias2;
    float decay, inverse_decay, weight_decay;
    bool l2;
    unsigned noise_key;
};

// Matches kMaxAxes of csrc/arm_adam/adam.h.
constexpr unsigned kMaxAxes = 6;

// Describes a piece in 232 bytes. An element's place in the whole parameter, modulo 2^32, keys the stochastic rounding:
// the shard's first element is at `start`, the piece's has `first_index` in the shard, whose axes
// (csrc/arm_adam/adam.h) begin with the innermost.
struct StepPiece {
    void* master;                  // fp32; of a split master the remainders (csrc/arm_adam/adam.h)
    unsigned short* upper_halves;  // of a split master
    void* exp_avg;
    void* exp_avg_sq;
    unsigned char* exp_avg_scales;  // of 8-bit moments, one for each kMomentBlock elements of the piece
    unsigned char* exp_avg_sq_scales;
    const void* gradient;
    void* parameter;
    unsigned long long numel;
    unsigned long long first_block;
    unsigned long long first_index;
    unsigned long long axis_lengths[kMaxAxes];
    unsigned axis_strides[kMaxAxes];
    unsigned start;
    unsigned axis_count;  // 0: the shard is one run of the whole parameter
    Scalars scalars;
};

// Returns the place of element `i` of a piece. The loop is unrolled, so that the piece stays in registers.
__device__ inline unsigned place_of(const StepPiece& piece, unsigned long long i) {
    unsigned long long index = piece.first_index + i;
    if (piece.axis_count == 0) return piece.start + static_cast<unsigned>(index);
    unsigned place = piece.start;
#pragma unroll
    for (unsigned k = 0; k < kMaxAxes; ++k) {
        if (k == piece.axis_count) break;
        place += static_cast<unsigned>(index % piece.axis_lengths[k]) * piece.axis_strides[k];
        index /= piece.axis_lengths[k];
    }
    return place;
}

__device__ inline unsigned noise(unsigned key, unsigned index) {
    unsigned x = index ^ key;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Rounds moments before they are stored and before the direction is computed from them.
struct ExactMoments {
    using Format = F32;
    __device__ static void round(const StepPiece&, float&, float&, unsigned long long) {}
};

struct NoisyMoments {
    using Format = Bf16;
    __device__ static float round_one(float x, unsigned noise16) {
        return __uint_as_float((F32::word(x) + noise16) & 0xffff0000u);
    }
    __device__ static void round(const StepPiece& piece, float& exp_avg, float& exp_avg_sq, unsigned long long i) {
        const unsigned random = noise(piece.scalars.noise_key, place_of(piece, i));
        exp_avg = round_one(exp_avg, random & 0xffffu);
        exp_avg_sq = round_one(exp_avg_sq, random >> 16);
    }
};

// Loads and stores `width` masters as words of fp32.
template <unsigned width>
struct WholeMasters {
    Packet<unsigned, width> words;

    __device__ static bool is_aligned(const StepPiece& piece) { return cuda::is_aligned(piece.master, width * 4); }
    // Points to the first of them; a split master has two pointers, which cost the kernels of whole ones no register.
    struct Place {
        unsigned* words;
        __device__ Place(const StepPiece& piece, unsigned long long begin)
            : words(static_cast<unsigned*>(piece.master) + begin) {}
    };

    __device__ void load(const Place& place, unsigned at) { words.load(place.words + at); }
    __device__ void store(const Place& place, unsigned at) const { words.store(place.words + at); }
    __device__ unsigned get(unsigned w) const { return words.get(w); }
    __device__ void set(unsigned w, float value) { words.set(w, F32::word(value)); }
    template <typename Published>
    __device__ static typename Published::Word published(float value) {
        return Published::word(value);
    }
};

template <unsigned width>
struct SplitMasters {
    Packet<unsigned short, width> upper;
    Packet<unsigned short, width> remainders;

    __device__ static bool is_aligned(const StepPiece& piece) {
        return cuda::is_aligned(piece.master, width * 2) && cuda::is_aligned(piece.upper_halves, width * 2);
    }
    struct Place {
        unsigned short* upper;
        unsigned short* remainders;
        __device__ Place(const StepPiece& piece, unsigned long long begin)
            : upper(piece.upper_halves + begin), remainders(static_cast<unsigned short*>(piece.master) + begin) {}
    };

    __device__ void load(const Place& place, unsigned at) {
        upper.load(place.upper + at);
        remainders.load(place.remainders + at);
    }
    __device__ void store(const Place& place, unsigned at) const {
        upper.store(place.upper + at);
        remainders.store(place.remainders + at);
    }
    __device__ unsigned get(unsigned w) const {
        const unsigned rest = remainders.get(w);
        return (static_cast<unsigned>(upper.get(w)) << 16) + rest - ((rest & 0x8000u) << 1);
    }
    __device__ void set(unsigned w, float value) {
        upper.set(w, published<Bf16>(value));
        remainders.set(w, static_cast<unsigned short>(F32::word(value)));
    }
    // Rounds to nearest, ties away from zero.
    template <typename Published>
    __device__ static unsigned short published(float value) {
        return static_cast<unsigned short>((F32::word(value) + 0x8000u) >> 16);
    }
};

// Computes new moments, not yet rounded.
__device__ inline void next_moments(const Scalars& s, float raw, float master, float& exp_avg, float& exp_avg_sq) {
    float g = __fmul_rn(raw, s.gradient_factor);
    if (s.l2) g = __fmaf_rn(s.weight_decay, master, g);
    const float second = __fmul_rn(s.one_minus_beta2, __fmul_rn(g, g));
    exp_avg = __fmaf_rn(s.beta1, exp_avg, __fmaf_rn(s.one_minus_beta1, g, __fmul_rn(s.beta1_rest, exp_avg)));
    exp_avg_sq = __fmaf_rn(s.beta2, exp_avg_sq, second);
}

__device__ inline void step_master(const Scalars& s, float& master, float exp_avg, float exp_avg_sq) {
    const float q = __fdiv_rn(exp_avg, __fmaf_rn(__fsqrt_rn(exp_avg_sq), s.inverse_sqrt_bias2, s.eps));
    master = __fmaf_rn(-s.step_size, q, s.l2 ? master : __fmul_rn(master, s.decay));
}

template <typename Moments>
__device__ inline void step_element(const StepPiece& piece, float raw, float& master, float& exp_avg, float& exp_avg_sq,
                                    unsigned long long i) {
    next_moments(piece.scalars, raw, master, exp_avg, exp_avg_sq);
    Moments::round(piece, exp_avg, exp_avg_sq, i);
    step_master(piece.scalars, master, exp_avg, exp_avg_sq);
}

// Steps `width` elements at once, `repeats` times, `apart` elements from each other: all loads before the first use.
template <typename Gradient, typename Published, typename Moments, typename Masters, unsigned width, unsigned repeats>
__device__ inline void step_elements(const StepPiece& piece, unsigned long long begin, unsigned apart) {
    using State = typename Moments::Format;
    const typename Masters::Place master(piece, begin);
    auto* const exp_avg = static_cast<typename State::Word*>(piece.exp_avg) + begin;
    auto* const exp_avg_sq = static_cast<typename State::Word*>(piece.exp_avg_sq) + begin;
    const auto* const gradient = static_cast<const typename Gradient::Word*>(piece.gradient) + begin;
    auto* const parameter = static_cast<typename Published::Word*>(piece.parameter) + begin;
    Masters p[repeats];
    Packet<typename State::Word, width> m[repeats];
    Packet<typename State::Word, width> v[repeats];
    Packet<typename Gradient::Word, width> g[repeats];
#pragma unroll
    for (unsigned k = 0; k < repeats; ++k) {
        p[k].load(master, k * apart);
        m[k].load(exp_avg + k * apart);
        v[k].load(exp_avg_sq + k * apart);
        g[k].load(gradient + k * apart);
    }
#pragma unroll
    for (unsigned k = 0; k < repeats; ++k) {
        Masters next_p;
        Packet<typename State::Word, width> next_m;
        Packet<typename State::Word, width> next_v;
        Packet<typename Published::Word, width> published;
#pragma unroll
        for (unsigned w = 0; w < width; ++w) {
            float next = __uint_as_float(p[k].get(w));
            float first = State::value(m[k].get(w));
            float second = State::value(v[k].get(w));
            step_element<Moments>(piece, Gradient::value(g[k].get(w)), next, first, second, begin + k * apart + w);
            next_p.set(w, next);
            next_m.set(w, State::word(first));
            next_v.set(w, State::word(second));
            published.set(w, Masters::template published<Published>(next));
        }
        next_p.store(master, k * apart);
        next_m.store(exp_avg + k * apart);
        next_v.store(exp_avg_sq + k * apart);
        published.store(parameter + k * apart);
    }
}

template <typename Gradient, typename Published, typename Moments, template <unsigned> class Masters>
__device__ inline void step(const StepPiece* pieces, unsigned count) {
    constexpr unsigned width = 4;
    constexpr unsigned repeats = kBlock / kThreads / width;
    using State = typename Moments::Format;
    const unsigned long long blocks = count_blocks(pieces, count);
    for (unsigned long long block = blockIdx.x; block < blocks; block += gridDim.x) {
        const Found<StepPiece> found = find_block(pieces, count, block);
        const StepPiece piece = *found.piece;
        if (found.numel == kBlock && Masters<width>::is_aligned(piece) &&
            is_aligned(piece.exp_avg, width * sizeof(typename State::Word)) &&
            is_aligned(piece.exp_avg_sq, width * sizeof(typename State::Word)) &&
            is_aligned(piece.gradient, width * sizeof(typename Gradient::Word)) &&
            is_aligned(piece.parameter, width * sizeof(typename Published::Word))) {
            step_elements<Gradient, Published, Moments, Masters<width>, width, repeats>(
                piece, found.begin + threadIdx.x * width, kThreads * width);
        } else {
            for (unsigned i = threadIdx.x; i < found.numel; i += kThreads) {
                step_elements<Gradient, Published, Moments, Masters<1>, 1, 1>(piece, found.begin + i, 0);
            }
        }
    }
}

}  // namespace cuda
}  // namespace superoffload
