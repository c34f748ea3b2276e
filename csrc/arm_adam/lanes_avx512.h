// Computes sixteen elements at a time with AVX-512 (F, BW, VL, DQ).
#pragma once

#include <immintrin.h>

#include "adam.h"
#include "escapes.h"

namespace superoffload::adam {
namespace {

struct Avx512Lanes {
    using F = __m512;
    using U = __m512i;
    using M = __mmask16;

    static std::size_t width() { return 16; }

    static U bits(F x) { return _mm512_castps_si512(x); }
    static F from_bits(U u) { return _mm512_castsi512_ps(u); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static U set_u(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static void store_shadow(float* p, F x, bool past_cache) { past_cache ? _mm512_stream_ps(p, x) : store(p, x); }
    static void fence() { _mm_sfence(); }
    static constexpr std::size_t kPrefetchAhead = 128;           // elements
    static constexpr std::size_t kPrefetchAheadJournaled = 256;  // more computation lies between two loads

    static __m256i load_half(const std::uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store_half(void* p, __m256i x, bool past_cache) {
        auto* to = static_cast<__m256i*>(p);
        past_cache ? _mm256_stream_si256(to, x) : _mm256_storeu_si256(to, x);
    }
    static F load_bf16(const std::uint16_t* p) {
        return from_bits(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(p)), 16));
    }
    static F load_f16(const std::uint16_t* p) { return _mm512_cvtph_ps(load_half(p)); }
    // Both conversions get canonical values, so NaN becomes 0x7fc0 and 0x7e00 like any other number. bf16 uses
    // integers, since the native conversion flushes denormals.
    static __m256i half_bf16(F x) {
        const U u = bits(x);
        const U odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), set_u(1));
        const U rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, set_u(0x7fff)), odd), 16);
        return _mm512_cvtepi32_epi16(rounded);
    }
    static __m256i half_f16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static void store_bf16(std::uint16_t* p, F x, bool past_cache = false) { store_half(p, half_bf16(x), past_cache); }
    static void store_f16(std::uint16_t* p, F x, bool past_cache = false) { store_half(p, half_f16(x), past_cache); }

    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    // The second one if it is NaN.
    static F min_f(F a, F b) { return _mm512_min_ps(a, b); }
    static F max_f(F a, F b) { return _mm512_max_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static constexpr bool kCanonicalNan = false;
    static F canonical(F x) { return _mm512_mask_mov_ps(x, is_nan(x), from_bits(set_u(0x7fc00000u))); }

    static U add_u(U a, U b) { return _mm512_add_epi32(a, b); }
    static U sub_u(U a, U b) { return _mm512_sub_epi32(a, b); }
    static U mul_u(U a, U b) { return _mm512_mullo_epi32(a, b); }
    static U xor_u(U a, U b) { return _mm512_xor_si512(a, b); }
    static U iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    static U min_u(U a, U b) { return _mm512_min_epu32(a, b); }
    static U max_u(U a, U b) { return _mm512_max_epu32(a, b); }
    static std::uint32_t largest_of(U a) { return _mm512_reduce_max_epu32(a); }
    static U and_u(U a, U b) { return _mm512_and_si512(a, b); }
    static U or_u(U a, U b) { return _mm512_or_si512(a, b); }
    template <int k>
    static U shl(U a) {
        return _mm512_slli_epi32(a, k);
    }
    template <int k>
    static U shr(U a) {
        return _mm512_srli_epi32(a, k);
    }
    // Returns a + (b >> k).
    template <int k>
    static U add_shifted(U a, U b) {
        return add_u(a, shr<k>(b));
    }
    static U spread_top_bit(U a) { return _mm512_srai_epi32(a, 31); }

    // Narrows two vectors to one of 16-bit words, saturated; pair_in_order() restores the order.
    static constexpr bool kPairs = true;
    static constexpr bool kPairsOverlap = true;
    static U narrow_pair(U a, U b) { return _mm512_packs_epi32(a, b); }
    static U pair_in_order(U words) {
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), words);
    }
    static U set_u16(std::uint16_t x) { return _mm512_set1_epi16(static_cast<short>(x)); }
    static U add_u16(U a, U b) { return _mm512_add_epi16(a, b); }
    static std::uint32_t nonzero_u16(U a) { return _mm512_test_epi16_mask(a, a); }
    static bool any_bit(U a) { return nonzero(a) != 0; }
    static void store_pair8(std::uint8_t* p, U words) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(words));
    }
    static void store_pair16(std::uint8_t* p, U words) { _mm512_storeu_si512(p, words); }
    // Whole lines bypass the caches, where a pair's shadow or a block's codes fill them.
    static constexpr bool kPairsFillLines = true;
    static void stream_pair_bf16(std::uint16_t* p, F x, F y) { stream_pair(p, half_bf16(x), half_bf16(y)); }
    static void stream_pair_f16(std::uint16_t* p, F x, F y) { stream_pair(p, half_f16(x), half_f16(y)); }
    static void stream_pair(std::uint16_t* p, __m256i x, __m256i y) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1));
    }
    static void stream_line(std::uint8_t* p, const std::uint8_t* from) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_load_si512(from));
    }
    static bool any_nan(F x, F y) { return _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q) != 0; }

    static M is_nan(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
    static M nonzero(U a) { return _mm512_test_epi32_mask(a, a); }
    static bool any_bit_or_nan(U a, F x) { return any(either(nonzero(a), is_nan(x))); }
    static M either(M a, M b) { return static_cast<M>(a | b); }
    static bool any(M m) { return m != 0; }
    static std::uint32_t count(M m) { return static_cast<std::uint32_t>(__builtin_popcount(m)); }
    static void append(EscapeList& list, M m, U old, std::uint32_t index) {
        const U indices = _mm512_maskz_compress_epi32(m, _mm512_add_epi32(iota(), set_u(index)));
        _mm512_storeu_si512(list.old + list.count, _mm512_maskz_compress_epi32(m, old));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(list.index + list.count), _mm512_cvtepi32_epi16(indices));
        list.count += count(m);
    }

    // Loads and stores the halves of split masters: signed words of 16 bits, and the lower half of each lane.
    static U load_i16(const std::int16_t* p) {
        return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static void store_low16(std::uint16_t* p, U u) { store_half(p, _mm512_cvtepi32_epi16(u), false); }

    static void store_codes8(std::uint8_t* p, U codes) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(codes));
    }
    static U load_codes8(const std::uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static U load_i8(const std::uint8_t* p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static void store_codes8_of_both(std::uint8_t* p, std::uint8_t* q, U a, U b) {
        store_codes8(p, a);
        store_codes8(q, b);
    }
    static void store_codes16(std::uint8_t* p, U codes) { store_half(p, _mm512_cvtepi32_epi16(codes), false); }
    static U load_codes16(const std::uint8_t* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }

    struct Sums {
        __m512d low = _mm512_setzero_pd();
        __m512d high = _mm512_setzero_pd();
    };
    static void sum16(Sums& sums, F x) {
        const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
        const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
        sums.low = _mm512_fmadd_pd(low, low, sums.low);
        sums.high = _mm512_fmadd_pd(high, high, sums.high);
    }
    static void sum16_f32(Sums& sums, const float* p) { sum16(sums, load(p)); }
    static void sum16_bf16(Sums& sums, const std::uint16_t* p) { sum16(sums, load_bf16(p)); }
    static void sum16_f16(Sums& sums, const std::uint16_t* p) { sum16(sums, load_f16(p)); }
    static void store_sums(const Sums& sums, double out[16]) {
        _mm512_storeu_pd(out, sums.low);
        _mm512_storeu_pd(out + 8, sums.high);
    }
};

}  // namespace
}  // namespace superoffload::adam
