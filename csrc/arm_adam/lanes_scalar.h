// Computes one element at a time: the plainest form of the arithmetic, and the tail of every other lane type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adam.h"
#include "escapes.h"

namespace superoffload::adam {
namespace {

struct ScalarLanes {
    using F = float;
    using U = std::uint32_t;
    using M = bool;

    static std::size_t width() { return 1; }

    static U bits(F x) {
        U u;
        std::memcpy(&u, &x, sizeof u);
        return u;
    }
    static F from_bits(U u) {
        F x;
        std::memcpy(&x, &u, sizeof x);
        return x;
    }

    static F set(float x) { return x; }
    static U set_u(std::uint32_t x) { return x; }
    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    // One element fills no line, so nothing bypasses the caches.
    static void store_shadow(float* p, F x, bool) { store(p, x); }
    static void fence() {}
    static constexpr std::size_t kPrefetchAhead = 0;
    static constexpr std::size_t kPrefetchAheadJournaled = 0;
    static constexpr bool kPairs = false;  // codes are packed vector by vector
    static constexpr bool kPairsFillLines = false;

    static F load_bf16(const std::uint16_t* p) { return from_bits(U{*p} << 16); }
    static F load_f16(const std::uint16_t* p) {
        const U half = *p;
        const U sign = (half & 0x8000u) << 16;
        const U exponent = (half >> 10) & 0x1fu;
        const U fraction = half & 0x3ffu;
        if (exponent == 0x1f) return from_bits(sign | 0x7f800000u | (fraction << 13));
        if (exponent != 0) return from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
        const F magnitude = static_cast<F>(fraction) * from_bits(0x33800000u);  // denormal: fraction x 2^-24, exact
        return from_bits(bits(magnitude) | sign);
    }
    // Gets canonical values, or from undo the bf16 words that were stored before, NaN or not: rounding keeps both.
    static void store_bf16(std::uint16_t* p, F x, bool = false) {
        const U u = bits(x);
        *p = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
    static void store_f16(std::uint16_t* p, F x, bool = false) {
        const U u = bits(x);
        const U sign = (u >> 16) & 0x8000u;
        const U magnitude = u & 0x7fffffffu;
        U half;
        if (magnitude > 0x7f800000u) {
            *p = 0x7e00;
            return;
        }
        if (magnitude >= 0x47800000u) {  // 65536 and more; 65520 to 65536 round up to infinity below
            half = 0x7c00u;
        } else if (magnitude >= 0x38800000u) {  // normal
            half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        } else {  // denormal: adding 0.5 leaves fraction x 2^24, rounded to nearest even, in the low bits
            half = bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
        }
        *p = static_cast<std::uint16_t>(sign | half);
    }

    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    // The second one if it is NaN. (In both, equal zeros of different sign do not occur.)
    static F min_f(F a, F b) { return a < b ? a : b; }
    static F max_f(F a, F b) { return a > b ? a : b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) { return __builtin_sqrtf(a); }
    static F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
    // Tells whether every NaN that an operation makes is the canonical one already.
    static constexpr bool kCanonicalNan = false;
    static F canonical(F x) { return x != x ? from_bits(0x7fc00000u) : x; }

    static U add_u(U a, U b) { return a + b; }
    static U sub_u(U a, U b) { return a - b; }
    static U mul_u(U a, U b) { return a * b; }
    static U xor_u(U a, U b) { return a ^ b; }
    static U iota() { return 0; }
    static U min_u(U a, U b) { return a < b ? a : b; }
    static U max_u(U a, U b) { return a > b ? a : b; }
    static std::uint32_t largest_of(U a) { return a; }
    static U and_u(U a, U b) { return a & b; }
    static U or_u(U a, U b) { return a | b; }
    template <int k>
    static U shl(U a) {
        return a << k;
    }
    template <int k>
    static U shr(U a) {
        return a >> k;
    }
    // Returns a + (b >> k).
    template <int k>
    static U add_shifted(U a, U b) {
        return add_u(a, shr<k>(b));
    }
    // Sets all bits of a lane whose topmost one is set, and none of the others.
    static U spread_top_bit(U a) { return 0u - (a >> 31); }

    static M is_nan(F x) { return x != x; }
    static M nonzero(U a) { return a != 0; }
    static bool any_bit_or_nan(U a, F x) { return a != 0 || is_nan(x); }
    static M either(M a, M b) { return a || b; }
    static bool any(M m) { return m; }
    static std::uint32_t count(M m) { return m ? 1 : 0; }
    static void append(EscapeList& list, M m, U old, std::uint32_t index) {
        if (m) list.append(index, old);
    }

    // Loads and stores the halves of split masters: signed words of 16 bits, and the lower half of each lane.
    static U load_i16(const std::int16_t* p) { return static_cast<U>(std::int32_t{*p}); }
    static void store_low16(std::uint16_t* p, U u) { *p = static_cast<std::uint16_t>(u); }

    static void store_codes8(std::uint8_t* p, U codes) { *p = static_cast<std::uint8_t>(codes); }
    static U load_codes8(const std::uint8_t* p) { return *p; }
    static U load_i8(const std::uint8_t* p) { return static_cast<U>(std::int32_t{static_cast<std::int8_t>(*p)}); }
    static void store_codes8_of_both(std::uint8_t* p, std::uint8_t* q, U a, U b) {
        store_codes8(p, a);
        store_codes8(q, b);
    }
    static void store_codes16(std::uint8_t* p, U codes) {
        const auto code = static_cast<std::uint16_t>(codes);
        std::memcpy(p, &code, sizeof code);
    }
    static U load_codes16(const std::uint8_t* p) {
        std::uint16_t code;
        std::memcpy(&code, p, sizeof code);
        return code;
    }

    // Holds sixteen fp64 sums; element i of a block goes to sum i % 16. The product of two fp32 values is exact.
    struct Sums {
        double s[16] = {};
    };
    template <typename Load>
    static void sum16(Sums& sums, Load load) {
        for (int i = 0; i < 16; ++i) {
            const double x = load(i);
            sums.s[i] += x * x;
        }
    }
    static void sum16_f32(Sums& sums, const float* p) {
        sum16(sums, [p](int i) { return p[i]; });
    }
    static void sum16_bf16(Sums& sums, const std::uint16_t* p) {
        sum16(sums, [p](int i) { return load_bf16(p + i); });
    }
    static void sum16_f16(Sums& sums, const std::uint16_t* p) {
        sum16(sums, [p](int i) { return load_f16(p + i); });
    }
    static void store_sums(const Sums& sums, double out[16]) { std::memcpy(out, sums.s, sizeof sums.s); }
};

}  // namespace
}  // namespace superoffload::adam
