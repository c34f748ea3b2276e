// Keeps moments in eight bits: operation by operation as csrc/arm_adam/moment_codes.inl, which says why it is right.
// docs/kernel.md has the format.
#pragma once

#include "elements.cuh"
#include "pieces.cuh"

namespace superoffload {
namespace cuda {

constexpr unsigned kMomentBlock = 256;  // elements that share a scale; as in csrc/arm_adam/adam.h
constexpr unsigned kNanScale = 255;
constexpr unsigned kInfinity = 0x7f800000u;
constexpr unsigned kMagnitude = 0x7fffffffu;  // all bits but the sign
constexpr unsigned kDroppedBits = 20;         // fraction bits of fp32 that codes lack

struct FirstCodes {  // exp_avg: sign, 4 exponent bits, 3 fraction bits
    static constexpr unsigned kBinades = 15;
    static constexpr unsigned kTop = 0x7f;
    static constexpr unsigned kSign = 0x80;
    static constexpr unsigned kLargest = kInfinity - 1;  // larger magnitudes make the block NaN
};

struct SecondCodes {  // exp_avg_sq: 5 exponent bits, 3 fraction bits
    static constexpr unsigned kBinades = 31;
    static constexpr unsigned kTop = 0xff;
    static constexpr unsigned kSign = 0;
    static constexpr unsigned kLargest = kInfinity;
};

// Chooses a block's scale by the largest bits of its magnitudes.
template <typename Codes>
__device__ inline unsigned scale_of(unsigned largest) {
    if (largest > Codes::kLargest) return kNanScale;
    const unsigned scale = (largest + (1u << kDroppedBits) - 1) >> 23;
    if (scale <= Codes::kBinades) return Codes::kBinades + 1;
    return scale < kNanScale ? scale : kNanScale - 1;
}

// Holds what codes mean under a scale.
template <typename Codes>
struct Grid {
    unsigned base;         // bits of the power of two of code 0's binade
    float twice_denormal;  // twice that power, negative; NaN if all moments of the block are NaN
    unsigned top, sign;

    __device__ explicit Grid(unsigned scale) {
        constexpr unsigned lowest = Codes::kBinades + 1;
        const bool nan = scale == kNanScale;
        base = ((nan || scale < lowest ? lowest : scale) - Codes::kBinades) << 23;
        twice_denormal = __uint_as_float(nan ? 0x7fc00000u : 0x80000000u | (base + (1u << 23)));
        top = nan ? 0 : Codes::kTop;
        sign = nan ? 0 : Codes::kSign;
    }

    // fminf and fmaxf would drop a NaN, which must win here.
    __device__ float magnitude(unsigned code) const {
        const float y = __uint_as_float((code << kDroppedBits) + base);
        const float denormal = __fmaf_rn(2.0f, y, twice_denormal);
        return y < denormal ? y : denormal;
    }
    __device__ float value(unsigned code) const {
        const float x = magnitude(code & Codes::kTop);
        return __uint_as_float(__float_as_uint(x) | (code & Codes::kSign) << 24);
    }

    // Rounds a new moment stochastically, in place, and returns its code. An exp_avg_sq above 0 never becomes 0.
    __device__ unsigned round(float& x, unsigned noise16) const {
        constexpr unsigned spare = kDroppedBits - 16;
        const unsigned noise = noise16 << spare | 1u << (spare - 1);
        const unsigned bits = __float_as_uint(x);
        const float large = Codes::kSign == 0 ? x : __uint_as_float(bits & kMagnitude);
        const float denormal = __fmaf_rn(0.5f, large, __uint_as_float(base));
        const float y = large > denormal ? large : denormal;
        unsigned unbounded = (__float_as_uint(y) - base + noise) >> kDroppedBits;
        if (Codes::kSign == 0 && unbounded == 0 && bits != 0) unbounded = 1;
        const unsigned code = unbounded < top ? unbounded : top;
        const unsigned negative = bits >> 24 & sign;
        x = __uint_as_float(__float_as_uint(magnitude(code)) | negative << 24);
        return code | negative;
    }
};

// Returns the largest of all lanes' values to each of them. The warp calls this as a whole.
__device__ inline unsigned largest_of_warp(unsigned x) {
#pragma unroll
    for (int distance = kWarp / 2; distance >= 1; distance /= 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, x, distance);
        x = x > other ? x : other;
    }
    return x;
}

}  // namespace cuda
}  // namespace superoffload
