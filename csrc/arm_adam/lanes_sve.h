// Computes as many elements at a time as one SVE vector holds. Vectors and masks are sizeless types, so they live in
// local variables only. The fp64 sums, which are always sixteen, use NEON.
#pragma once

#include <arm_sve.h>

#include <cstring>

#include "adam.h"
#include "escapes.h"
#include "lanes_neon.h"

namespace superoffload::adam {
namespace {

struct SveLanes {
    using F = svfloat32_t;
    using U = svuint32_t;
    using M = svbool_t;

    static std::size_t width() { return svcntw(); }
    static M all() { return svptrue_b32(); }

    static U bits(F x) { return svreinterpret_u32_f32(x); }
    static F from_bits(U u) { return svreinterpret_f32_u32(u); }
    static F set(float x) { return svdup_n_f32(x); }
    static U set_u(std::uint32_t x) { return svdup_n_u32(x); }
    static F load(const float* p) { return svld1_f32(all(), p); }
    static void store(float* p, F x) { svst1_f32(all(), p, x); }
    // ARM's cores detect stores of whole lines by themselves, so this needs no special store.
    static void store_shadow(float* p, F x, bool) { store(p, x); }
    static void fence() {}
    static constexpr std::size_t kPrefetchAhead = 0;
    static constexpr std::size_t kPrefetchAheadJournaled = 0;
    static constexpr bool kPairs = false;  // codes are packed vector by vector
    static constexpr bool kPairsFillLines = false;

    static F load_bf16(const std::uint16_t* p) { return from_bits(svlsl_n_u32_x(all(), svld1uh_u32(all(), p), 16)); }
    static F load_f16(const std::uint16_t* p) {
        return svcvt_f32_f16_x(all(), svreinterpret_f16_u32(svld1uh_u32(all(), p)));
    }
    // Both conversions get canonical values, so NaN becomes 0x7fc0 and 0x7e00 like any other number. bf16 uses
    // integers, since not every AArch64 processor has the native conversion.
    static void store_bf16(std::uint16_t* p, F x, bool = false) {
        const U u = bits(x);
        const U odd = svand_n_u32_x(all(), svlsr_n_u32_x(all(), u, 16), 1);
        const U sum = svadd_u32_x(all(), svadd_n_u32_x(all(), u, 0x7fff), odd);
        svst1h_u32(all(), p, svlsr_n_u32_x(all(), sum, 16));
    }
    static void store_f16(std::uint16_t* p, F x, bool = false) {
        svst1h_u32(all(), p, svreinterpret_u32_f16(svcvt_f16_f32_x(all(), x)));
    }

    static F add(F a, F b) { return svadd_f32_x(all(), a, b); }
    static F sub(F a, F b) { return svsub_f32_x(all(), a, b); }
    static F mul(F a, F b) { return svmul_f32_x(all(), a, b); }
    // NaN if either is.
    static F min_f(F a, F b) { return svmin_f32_x(all(), a, b); }
    static F max_f(F a, F b) { return svmax_f32_x(all(), a, b); }
    static F div(F a, F b) { return svdiv_f32_x(all(), a, b); }
    static F sqrt(F a) { return svsqrt_f32_x(all(), a); }
    static F fma(F a, F b, F c) { return svmla_f32_x(all(), c, a, b); }
    // FloatEnvironment makes the processor produce only the canonical NaN.
    static constexpr bool kCanonicalNan = true;
    static F canonical(F x) { return x; }

    static U add_u(U a, U b) { return svadd_u32_x(all(), a, b); }
    static U sub_u(U a, U b) { return svsub_u32_x(all(), a, b); }
    static U mul_u(U a, U b) { return svmul_u32_x(all(), a, b); }
    static U xor_u(U a, U b) { return sveor_u32_x(all(), a, b); }
    static U iota() { return svindex_u32(0, 1); }
    static U min_u(U a, U b) { return svmin_u32_x(all(), a, b); }
    static U max_u(U a, U b) { return svmax_u32_x(all(), a, b); }
    static std::uint32_t largest_of(U a) { return svmaxv_u32(all(), a); }
    static U and_u(U a, U b) { return svand_u32_x(all(), a, b); }
    static U or_u(U a, U b) { return svorr_u32_x(all(), a, b); }
    // A shift by 0 is a wasted instruction on the left and no valid immediate on the right.
    template <int k>
    static U shl(U a) {
        if constexpr (k == 0) {
            return a;
        } else {
            return svlsl_n_u32_x(all(), a, k);
        }
    }
    template <int k>
    static U shr(U a) {
        if constexpr (k == 0) {
            return a;
        } else {
            return svlsr_n_u32_x(all(), a, k);
        }
    }
    // Returns a + (b >> k).
    template <int k>
    static U add_shifted(U a, U b) {
        return add_u(a, shr<k>(b));
    }
    static U spread_top_bit(U a) { return svreinterpret_u32_s32(svasr_n_s32_x(all(), svreinterpret_s32_u32(a), 31)); }

    static M is_nan(F x) { return svcmpuo_f32(all(), x, x); }
    static M nonzero(U a) { return svcmpne_n_u32(all(), a, 0); }
    static bool any_bit_or_nan(U a, F x) { return any(either(nonzero(a), is_nan(x))); }
    static M either(M a, M b) { return svorr_b_z(all(), a, b); }
    static bool any(M m) { return svptest_any(all(), m); }
    static std::uint32_t count(M m) { return static_cast<std::uint32_t>(svcntp_b32(all(), m)); }
    // Stores whole vectors; the list's slack is as long as the longest vector.
    static void append(EscapeList& list, M m, U old, std::uint32_t index) {
        static_assert(EscapeList::kSlack >= 2048 / 32);
        svst1_u32(all(), list.old + list.count, svcompact_u32(m, old));
        svst1h_u32(all(), list.index + list.count, svcompact_u32(m, svindex_u32(index, 1)));
        list.count += count(m);
    }

    // Loads and stores the halves of split masters: signed words of 16 bits, and the lower half of each lane.
    static U load_i16(const std::int16_t* p) { return svreinterpret_u32_s32(svld1sh_s32(all(), p)); }
    static void store_low16(std::uint16_t* p, U u) { svst1h_u32(all(), p, u); }

    static void store_codes8(std::uint8_t* p, U codes) { svst1b_u32(all(), p, codes); }
    static U load_codes8(const std::uint8_t* p) { return svld1ub_u32(all(), p); }
    static U load_i8(const std::uint8_t* p) {
        return svreinterpret_u32_s32(svld1sb_s32(all(), reinterpret_cast<const std::int8_t*>(p)));
    }
    static void store_codes8_of_both(std::uint8_t* p, std::uint8_t* q, U a, U b) {
        store_codes8(p, a);
        store_codes8(q, b);
    }
    static void store_codes16(std::uint8_t* p, U codes) {
        svst1h_u32(all(), reinterpret_cast<std::uint16_t*>(p), codes);
    }
    static U load_codes16(const std::uint8_t* p) {
        return svld1uh_u32(all(), reinterpret_cast<const std::uint16_t*>(p));
    }

    using Sums = NeonLanes::Sums;
    static void sum16_f32(Sums& sums, const float* p) { NeonLanes::sum16_f32(sums, p); }
    static void sum16_bf16(Sums& sums, const std::uint16_t* p) { NeonLanes::sum16_bf16(sums, p); }
    static void sum16_f16(Sums& sums, const std::uint16_t* p) { NeonLanes::sum16_f16(sums, p); }
    static void store_sums(const Sums& sums, double out[16]) { NeonLanes::store_sums(sums, out); }
};

}  // namespace
}  // namespace superoffload::adam
