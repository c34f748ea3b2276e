// Computes four elements at a time with NEON (Advanced SIMD of every AArch64 processor).
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "adam.h"
#include "escapes.h"

namespace superoffload::adam {
namespace {

struct NeonLanes {
    using F = float32x4_t;
    using U = uint32x4_t;
    using M = uint32x4_t;  // all bits of a lane set, or none

    static std::size_t width() { return 4; }

    static U bits(F x) { return vreinterpretq_u32_f32(x); }
    static F from_bits(U u) { return vreinterpretq_f32_u32(u); }
    static F set(float x) { return vdupq_n_f32(x); }
    static U set_u(std::uint32_t x) { return vdupq_n_u32(x); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    // ARM's cores detect stores of whole lines by themselves, so this needs no special store.
    static void store_shadow(float* p, F x, bool) { store(p, x); }
    static void fence() {}
    static constexpr std::size_t kPrefetchAhead = 0;
    static constexpr std::size_t kPrefetchAheadJournaled = 0;
    static constexpr bool kPairs = false;  // codes are packed vector by vector
    static constexpr bool kPairsFillLines = false;

    static F load_bf16(const std::uint16_t* p) { return from_bits(vshll_n_u16(vld1_u16(p), 16)); }
    static F load_f16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    // Both conversions get canonical values, so NaN becomes 0x7fc0 and 0x7e00 like any other number. bf16 uses
    // integers, since not every AArch64 processor has the native conversion.
    static void store_bf16(std::uint16_t* p, F x, bool = false) {
        const U u = bits(x);
        const U odd = vandq_u32(vshrq_n_u32(u, 16), set_u(1));
        vst1_u16(p, vaddhn_u32(u, vaddq_u32(odd, set_u(0x7fff))));
    }
    static void store_f16(std::uint16_t* p, F x, bool = false) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    // NaN if either is.
    static F min_f(F a, F b) { return vminq_f32(a, b); }
    static F max_f(F a, F b) { return vmaxq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    // FloatEnvironment makes the processor produce only the canonical NaN.
    static constexpr bool kCanonicalNan = true;
    static F canonical(F x) { return x; }

    static U add_u(U a, U b) { return vaddq_u32(a, b); }
    static U sub_u(U a, U b) { return vsubq_u32(a, b); }
    static U mul_u(U a, U b) { return vmulq_u32(a, b); }
    static U xor_u(U a, U b) { return veorq_u32(a, b); }
    static U iota() {
        static constexpr std::uint32_t kLane[4] = {0, 1, 2, 3};
        return vld1q_u32(kLane);
    }
    static U min_u(U a, U b) { return vminq_u32(a, b); }
    static U max_u(U a, U b) { return vmaxq_u32(a, b); }
    static std::uint32_t largest_of(U a) { return vmaxvq_u32(a); }
    static U and_u(U a, U b) { return vandq_u32(a, b); }
    static U or_u(U a, U b) { return vorrq_u32(a, b); }
    // A shift by 0 is a wasted instruction on the left and no valid immediate on the right.
    template <int k>
    static U shl(U a) {
        if constexpr (k == 0) {
            return a;
        } else {
            return vshlq_n_u32(a, k);
        }
    }
    template <int k>
    static U shr(U a) {
        if constexpr (k == 0) {
            return a;
        } else {
            return vshrq_n_u32(a, k);
        }
    }
    // Returns a + (b >> k).
    template <int k>
    static U add_shifted(U a, U b) {
        return vsraq_n_u32(a, b, k);
    }
    static U spread_top_bit(U a) { return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a), 31)); }

    static M is_nan(F x) { return vmvnq_u32(vceqq_f32(x, x)); }
    static M nonzero(U a) { return vtstq_u32(a, a); }
    static bool any_bit_or_nan(U a, F x) { return vmaxvq_u32(vorrq_u32(a, is_nan(x))) != 0; }
    static M either(M a, M b) { return vorrq_u32(a, b); }
    static bool any(M m) { return vget_lane_u64(vreinterpret_u64_u16(vmovn_u32(m)), 0) != 0; }
    static std::uint32_t count(M m) { return vaddvq_u32(vandq_u32(m, set_u(1))); }
    // Works without branches: every lane is written, and only a lane of the mask moves the end of the list.
    static void append(EscapeList& list, M m, U old, std::uint32_t index) {
        alignas(16) std::uint32_t words[4];
        alignas(16) std::uint32_t taken[4];
        vst1q_u32(words, old);
        vst1q_u32(taken, vandq_u32(m, set_u(1)));
        std::uint32_t end = list.count;
        for (std::uint32_t lane = 0; lane < 4; ++lane) {
            list.old[end] = words[lane];
            list.index[end] = static_cast<std::uint16_t>(index + lane);
            end += taken[lane];
        }
        list.count = end;
    }

    // Loads and stores the halves of split masters: signed words of 16 bits, and the lower half of each lane.
    static U load_i16(const std::int16_t* p) { return vreinterpretq_u32_s32(vmovl_s16(vld1_s16(p))); }
    static void store_low16(std::uint16_t* p, U u) { vst1_u16(p, vmovn_u32(u)); }

    static void store_codes8(std::uint8_t* p, U codes) {
        const uint16x4_t words = vmovn_u32(codes);
        const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
        const std::uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
        std::memcpy(p, &four, sizeof four);
    }
    static U load_codes8(const std::uint8_t* p) {
        std::uint32_t four;
        std::memcpy(&four, p, sizeof four);
        return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
    }
    static U load_i8(const std::uint8_t* p) {
        std::uint32_t four;
        std::memcpy(&four, p, sizeof four);
        return vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
    }
    // Narrows the codes of two arrays together.
    static void store_codes8_of_both(std::uint8_t* p, std::uint8_t* q, U a, U b) {
        const uint16x8_t words = vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b));
        const uint32x2_t bytes = vreinterpret_u32_u8(vmovn_u16(words));
        const std::uint32_t first = vget_lane_u32(bytes, 0);
        const std::uint32_t second = vget_lane_u32(bytes, 1);
        std::memcpy(p, &first, sizeof first);
        std::memcpy(q, &second, sizeof second);
    }
    static void store_codes16(std::uint8_t* p, U codes) { vst1_u8(p, vreinterpret_u8_u16(vmovn_u32(codes))); }
    static U load_codes16(const std::uint8_t* p) { return vmovl_u16(vreinterpret_u16_u8(vld1_u8(p))); }

    struct Sums {
        float64x2_t s[8] = {};
    };
    static void sum4(Sums& sums, F x, int at) {
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(x));
        const float64x2_t high = vcvt_high_f64_f32(x);
        sums.s[at] = vfmaq_f64(sums.s[at], low, low);
        sums.s[at + 1] = vfmaq_f64(sums.s[at + 1], high, high);
    }
    static void sum16_f32(Sums& sums, const float* p) {
        for (int i = 0; i < 4; ++i) sum4(sums, load(p + 4 * i), 2 * i);
    }
    static void sum16_bf16(Sums& sums, const std::uint16_t* p) {
        for (int i = 0; i < 4; ++i) sum4(sums, load_bf16(p + 4 * i), 2 * i);
    }
    static void sum16_f16(Sums& sums, const std::uint16_t* p) {
        for (int i = 0; i < 4; ++i) sum4(sums, load_f16(p + 4 * i), 2 * i);
    }
    static void store_sums(const Sums& sums, double out[16]) {
        for (int i = 0; i < 8; ++i) vst1q_f64(out + 2 * i, sums.s[i]);
    }
};

}  // namespace
}  // namespace superoffload::adam
