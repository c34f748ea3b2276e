// Keeps moments in eight bits. Codes are small floating-point numbers, and the 256 of a block share a scale. Part of
// algorithm.inl; docs/kernel.md has the format.
#pragma once

#include "arithmetic.inl"
#include "journal.inl"

namespace superoffload::adam {
namespace {

// Counts the fraction bits of fp32 that codes lack.
constexpr int kDroppedBits = 20;

// Says how the magnitudes of a moment's codes are made: `kBinades` binades lie between the scale's and that of code 0,
// whose numbers are denormal.
template <int component>
struct CodeFormat;
template <>
struct CodeFormat<0> {  // exp_avg: sign, 4 exponent bits, 3 fraction bits
    static constexpr std::uint32_t kBinades = 15;
    static constexpr std::uint32_t kTop = 0x7f;
    static constexpr std::uint32_t kSign = 0x80;
};
template <>
struct CodeFormat<1> {  // exp_avg_sq: 5 exponent bits, 3 fraction bits
    static constexpr std::uint32_t kBinades = 31;
    static constexpr std::uint32_t kTop = 0xff;
    static constexpr std::uint32_t kSign = 0;
};

constexpr std::uint32_t kNanScale = 255;
constexpr std::uint32_t kInfinity = 0x7f800000u;

// Holds what codes mean under a scale, the biased exponent of the block's topmost binade. 0, as in fresh memory, is the
// smallest scale that has all binades.
template <int component>
struct Grid {
    using Format = CodeFormat<component>;

    explicit Grid(std::uint32_t scale) {
        const bool nan = scale == kNanScale;
        const std::uint32_t lowest = Format::kBinades + 1;
        base = ((nan || scale < lowest ? lowest : scale) - Format::kBinades) << 23;
        denormal = ScalarLanes::from_bits(base);
        twice_denormal = ScalarLanes::from_bits(nan ? 0x7fc00000u : 0x80000000u | (base + (1u << 23)));
        top = nan ? 0 : Format::kTop;
        sign = nan ? 0 : Format::kSign;
    }

    std::uint32_t base;    // bits of the power of two of code 0's binade
    float denormal;        // that power of two
    float twice_denormal;  // twice, negative; NaN if all moments of the block are NaN
    std::uint32_t top, sign;
};

// Chooses the smallest scale under which rounding a block's values cannot exceed the topmost code. `largest`: the
// largest bits of their magnitudes. NaN makes all moments of the block NaN, and so does an infinite exp_avg, while an
// infinite exp_avg_sq (the square of a finite gradient) becomes the largest number.
template <int component>
inline std::uint32_t scale_of(std::uint32_t largest) {
    using Format = CodeFormat<component>;
    if (largest > kInfinity || (component == 0 && largest == kInfinity)) return kNanScale;
    const std::uint32_t scale = (largest + (1u << kDroppedBits) - 1) >> 23;
    if (scale <= Format::kBinades) return Format::kBinades + 1;
    return scale < kNanScale ? scale : kNanScale - 1;
}

// Returns the number that a magnitude's code stands for. With y the number whose bits are the code's behind the base,
// a normal code means y, and a denormal one 2 y - 2 h (h: the power of two of code 0), which is the smaller.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::F magnitude_of(typename L::U code, const Grid<component>& grid) {
    const auto bits = L::add_u(L::template shl<kDroppedBits>(code), L::set_u(grid.base));
    const auto y = L::from_bits(bits);
    return L::min_f(y, L::fma(L::set(2.0f), y, L::set(grid.twice_denormal)));
}

// Rounds magnitudes to codes: `noise` is added to the dropped bits, those below 1 << kDroppedBits. An exp_avg_sq above
// 0 never becomes 0: next to an exp_avg that was rounded up, it would make the update explode.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U code_of_magnitude(typename L::F x, typename L::U noise, const Grid<component>& grid) {
    const auto y = L::max_f(x, L::fma(L::set(0.5f), x, L::set(grid.denormal)));
    const auto sum = L::add_u(L::sub_u(L::bits(y), L::set_u(grid.base)), noise);
    auto code = L::template shr<kDroppedBits>(sum);
    if constexpr (component == 1) code = L::max_u(code, L::min_u(L::bits(x), L::set_u(1)));
    return L::min_u(code, L::set_u(grid.top));
}

template <typename L>
SUPEROFFLOAD_INLINE typename L::F absolute(typename L::F x) {
    return L::from_bits(L::and_u(L::bits(x), L::set_u(0x7fffffffu)));
}

// Loads moments from their codes.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::F load_moment(const void* codes, std::size_t i, const Grid<component>& grid) {
    const auto code = L::load_codes8(static_cast<const std::uint8_t*>(codes) + i);
    if constexpr (component == 1) {
        return magnitude_of<L>(code, grid);
    } else {
        const auto x = magnitude_of<L>(L::and_u(code, L::set_u(CodeFormat<0>::kTop)), grid);
        const auto sign = L::template shl<24>(L::and_u(code, L::set_u(CodeFormat<0>::kSign)));
        return L::from_bits(L::or_u(L::bits(x), sign));
    }
}

// Rounds new moments stochastically, in place, and returns their codes. Half a unit of the noise is added, so that its
// sixteen bits leave no bias, but not enough to move a number that has a code.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U round_moment(typename L::F& x, typename L::U random, const Grid<component>& grid) {
    if constexpr (component == 0) {
        const auto low = L::template shr<12>(L::template shl<16>(random));
        const auto code = code_of_magnitude<L>(absolute<L>(x), L::or_u(low, L::set_u(1u << 3)), grid);
        const auto sign = L::and_u(L::template shr<24>(L::bits(x)), L::set_u(grid.sign));
        x = L::from_bits(L::or_u(L::bits(magnitude_of<L>(code, grid)), L::template shl<24>(sign)));
        return L::or_u(code, sign);
    } else {
        const auto high = L::template shl<4>(L::template shr<16>(random));
        const auto code = code_of_magnitude<L>(x, L::or_u(high, L::set_u(1u << 3)), grid);
        x = magnitude_of<L>(code, grid);
        return code;
    }
}

// Converts codes to the integers that a journal's codes count in, which are ordered as the numbers are: exp_avg's
// negative codes become -1 (for -0) and below.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U word_of_code(typename L::U code) {
    if constexpr (component == 1) return code;
    const auto negative = L::sub_u(L::set_u(0), L::template shr<7>(code));
    return L::xor_u(L::and_u(code, L::set_u(CodeFormat<0>::kTop)), negative);
}

template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U code_of_word(typename L::U word) {
    if constexpr (component == 1) return word;
    const auto negative = L::sub_u(L::set_u(0), L::template shr<31>(word));
    return L::or_u(L::xor_u(word, negative), L::and_u(negative, L::set_u(CodeFormat<0>::kSign)));
}

// Converts an estimate of an old moment to such an integer, by rounding to nearest under the old scale. The sign of a
// NaN, which processors choose differently, must not matter.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U estimated_code_word(typename L::F estimate, const Grid<component>& old) {
    const auto half = L::set_u(1u << (kDroppedBits - 1));
    if constexpr (component == 1) {
        return code_of_magnitude<L>(L::max_f(L::set(0.0f), estimate), half, old);
    } else {
        const auto known = L::canonical(estimate);
        const auto negative = L::sub_u(L::set_u(0), L::template shr<31>(L::bits(known)));
        return L::xor_u(code_of_magnitude<L>(absolute<L>(known), half, old), negative);
    }
}

}  // namespace
}  // namespace superoffload::adam
