// Computes eight elements at a time with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "adam.h"
#include "escapes.h"

namespace superoffload::adam {
namespace {

struct Avx2Lanes {
    using F = __m256;
    using U = __m256i;
    using M = __m256i;  // all bits of a lane set, or none

    static std::size_t width() { return 8; }

    static U bits(F x) { return _mm256_castps_si256(x); }
    static F from_bits(U u) { return _mm256_castsi256_ps(u); }
    static F set(float x) { return _mm256_set1_ps(x); }
    static U set_u(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static void store_shadow(float* p, F x, bool past_cache) { past_cache ? _mm256_stream_ps(p, x) : store(p, x); }
    static void fence() { _mm_sfence(); }
    static constexpr std::size_t kPrefetchAhead = 128;  // elements
    static constexpr std::size_t kPrefetchAheadJournaled = 128;

    static __m128i load_half(const std::uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
    static void store_half(void* p, __m128i x, bool past_cache) {
        auto* to = static_cast<__m128i*>(p);
        past_cache ? _mm_stream_si128(to, x) : _mm_storeu_si128(to, x);
    }
    // Takes the low 16 bits of each 32-bit lane; the high ones are zero.
    static __m128i narrow16(U u) { return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1)); }
    static M is_nan(F x) { return bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }

    static F load_bf16(const std::uint16_t* p) {
        return from_bits(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16));
    }
    static F load_f16(const std::uint16_t* p) { return _mm256_cvtph_ps(load_half(p)); }
    // Both conversions get canonical values, so NaN becomes 0x7fc0 and 0x7e00 like any other number.
    static void store_bf16(std::uint16_t* p, F x, bool past_cache = false) {
        const U u = bits(x);
        const U odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), set_u(1));
        const U rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, set_u(0x7fff)), odd), 16);
        store_half(p, narrow16(rounded), past_cache);
    }
    static void store_f16(std::uint16_t* p, F x, bool past_cache = false) {
        store_half(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), past_cache);
    }

    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    // The second one if it is NaN.
    static F min_f(F a, F b) { return _mm256_min_ps(a, b); }
    static F max_f(F a, F b) { return _mm256_max_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static constexpr bool kCanonicalNan = false;
    static F canonical(F x) {
        return _mm256_blendv_ps(x, from_bits(set_u(0x7fc00000u)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    }

    static U add_u(U a, U b) { return _mm256_add_epi32(a, b); }
    static U sub_u(U a, U b) { return _mm256_sub_epi32(a, b); }
    static U mul_u(U a, U b) { return _mm256_mullo_epi32(a, b); }
    static U xor_u(U a, U b) { return _mm256_xor_si256(a, b); }
    static U iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
    static U min_u(U a, U b) { return _mm256_min_epu32(a, b); }
    static U max_u(U a, U b) { return _mm256_max_epu32(a, b); }
    static std::uint32_t largest_of(U a) {
        __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
        x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
        return static_cast<std::uint32_t>(_mm_cvtsi128_si32(x));
    }
    static U and_u(U a, U b) { return _mm256_and_si256(a, b); }
    static U or_u(U a, U b) { return _mm256_or_si256(a, b); }
    template <int k>
    static U shl(U a) {
        return _mm256_slli_epi32(a, k);
    }
    template <int k>
    static U shr(U a) {
        return _mm256_srli_epi32(a, k);
    }
    // Returns a + (b >> k).
    template <int k>
    static U add_shifted(U a, U b) {
        return add_u(a, shr<k>(b));
    }
    static U spread_top_bit(U a) { return _mm256_srai_epi32(a, 31); }

    // Narrows two vectors to one of 16-bit words, saturated; pair_in_order() restores the order.
    static constexpr bool kPairs = true;
    static constexpr bool kPairsOverlap = false;  // sixteen registers are too few
    static U narrow_pair(U a, U b) { return _mm256_packs_epi32(a, b); }
    static U pair_in_order(U words) { return _mm256_permute4x64_epi64(words, 0xd8); }
    static U set_u16(std::uint16_t x) { return _mm256_set1_epi16(static_cast<short>(x)); }
    static U add_u16(U a, U b) { return _mm256_add_epi16(a, b); }
    static std::uint32_t nonzero_u16(U a) {
        const U zero = _mm256_cmpeq_epi16(a, _mm256_setzero_si256());
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(zero), _mm256_extracti128_si256(zero, 1));
        return static_cast<std::uint32_t>(_mm_movemask_epi8(bytes)) ^ 0xffffu;
    }
    static bool any_bit(U a) { return _mm256_testz_si256(a, a) == 0; }
    static void store_pair8(std::uint8_t* p, U words) {
        const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
    }
    static void store_pair16(std::uint8_t* p, U words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words); }
    static constexpr bool kPairsFillLines = false;
    static bool any_nan(F x, F y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q)) != 0; }

    static M nonzero(U a) { return _mm256_xor_si256(_mm256_cmpeq_epi32(a, _mm256_setzero_si256()), set_u(~0u)); }
    static bool any_bit_or_nan(U a, F x) {
        const U bits_or_nan = _mm256_or_si256(a, is_nan(x));
        return _mm256_testz_si256(bits_or_nan, bits_or_nan) == 0;
    }
    static M either(M a, M b) { return _mm256_or_si256(a, b); }
    static unsigned mask_of(M m) { return static_cast<unsigned>(_mm256_movemask_ps(from_bits(m))); }
    static bool any(M m) { return mask_of(m) != 0; }
    static std::uint32_t count(M m) { return static_cast<std::uint32_t>(__builtin_popcount(mask_of(m))); }
    static void append(EscapeList& list, M m, U old, std::uint32_t index) {
        alignas(32) std::uint32_t words[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(words), old);
        for (unsigned mask = mask_of(m); mask != 0; mask &= mask - 1) {
            const auto lane = static_cast<std::uint32_t>(__builtin_ctz(mask));
            list.append(index + lane, words[lane]);
        }
    }

    // Loads and stores the halves of split masters: signed words of 16 bits, and the lower half of each lane.
    static U load_i16(const std::int16_t* p) {
        return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_low16(std::uint16_t* p, U u) { store_half(p, narrow16(and_u(u, set_u(0xffffu))), false); }

    static void store_codes8(std::uint8_t* p, U codes) {
        const __m128i words = narrow16(codes);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
    }
    static U load_codes8(const std::uint8_t* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static U load_i8(const std::uint8_t* p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_codes8_of_both(std::uint8_t* p, std::uint8_t* q, U a, U b) {
        store_codes8(p, a);
        store_codes8(q, b);
    }
    static void store_codes16(std::uint8_t* p, U codes) { store_half(p, narrow16(codes), false); }
    static U load_codes16(const std::uint8_t* p) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }

    struct Sums {
        __m256d s[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    };
    static void sum8(Sums& sums, F x, int at) {
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        sums.s[at] = _mm256_fmadd_pd(low, low, sums.s[at]);
        sums.s[at + 1] = _mm256_fmadd_pd(high, high, sums.s[at + 1]);
    }
    static void sum16_f32(Sums& sums, const float* p) {
        sum8(sums, load(p), 0);
        sum8(sums, load(p + 8), 2);
    }
    static void sum16_bf16(Sums& sums, const std::uint16_t* p) {
        sum8(sums, load_bf16(p), 0);
        sum8(sums, load_bf16(p + 8), 2);
    }
    static void sum16_f16(Sums& sums, const std::uint16_t* p) {
        sum8(sums, load_f16(p), 0);
        sum8(sums, load_f16(p + 8), 2);
    }
    static void store_sums(const Sums& sums, double out[16]) {
        for (int i = 0; i < 4; ++i) _mm256_storeu_pd(out + 4 * i, sums.s[i]);
    }
};

}  // namespace
}  // namespace superoffload::adam
