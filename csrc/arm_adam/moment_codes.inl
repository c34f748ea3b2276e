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
    static constexpr std::uint32_t kDropped = (1u << kDroppedBits) - 1;

    explicit Grid(std::uint32_t scale) {
        const bool nan = scale == kNanScale;
        const std::uint32_t lowest = Format::kBinades + 1;
        base = ((nan || scale < lowest ? lowest : scale) - Format::kBinades) << 23;
        denormal = ScalarLanes::from_bits(base);
        twice_denormal = ScalarLanes::from_bits(nan ? 0x7fc00000u : 0x80000000u | (base + (1u << 23)));
        top = nan ? 0 : Format::kTop;
        last = base + (top << kDroppedBits | kDropped);
        sign = nan ? 0 : Format::kSign << 24;
    }

    std::uint32_t base;    // bits of the power of two of code 0's binade
    float denormal;        // that power of two
    float twice_denormal;  // twice, negative; NaN if all moments of the block are NaN
    std::uint32_t top;     // the largest code of a magnitude
    std::uint32_t last;    // the largest bits that round down to it
    std::uint32_t sign;    // the sign's bit of a number, if codes have one
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

// Returns the number that a magnitude's code stands for, from the code's bits behind the base as a number y. A normal
// code means y, and a denormal one 2 y - 2 h (h: the power of two of code 0): that is y and what is negative of y - 2
// h.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::F magnitude_at(typename L::F y, const Grid<component>& grid) {
    return L::add(y, L::min_f(L::set(0.0f), L::add(y, L::set(grid.twice_denormal))));
}

// Returns the bits of the number that magnitude_at() takes for a magnitude, not rounded to a code yet.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U position_of(typename L::F x, const Grid<component>& grid) {
    return L::bits(L::max_f(x, L::fma(L::set(0.5f), x, L::set(grid.denormal))));
}

template <typename L>
SUPEROFFLOAD_INLINE typename L::F absolute(typename L::F x) {
    return L::from_bits(L::and_u(L::bits(x), L::set_u(0x7fffffffu)));
}

// Loads moments from their codes.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::F load_moment(const void* codes, std::size_t i, const Grid<component>& grid) {
    const auto* at = static_cast<const std::uint8_t*>(codes) + i;
    if constexpr (component == 1) {
        const auto behind_base = L::template shl<kDroppedBits>(L::load_codes8(at));
        return magnitude_at<L>(L::from_bits(L::add_u(behind_base, L::set_u(grid.base))), grid);
    } else {
        const auto code = L::load_i8(at);
        const auto behind_base =
            L::and_u(L::template shl<kDroppedBits>(code), L::set_u(CodeFormat<0>::kTop << kDroppedBits));
        const auto x = magnitude_at<L>(L::from_bits(L::add_u(behind_base, L::set_u(grid.base))), grid);
        return L::from_bits(L::or_u(L::bits(x), L::and_u(code, L::set_u(0x80000000u))));
    }
}

// Makes the noise of both moments: the halves of noise(), the lower one for exp_avg, in upper halves, where the last
// step of noise() is done too. Half a unit is below them, so that sixteen bits leave no bias, but not enough to move a
// number that has a code.
template <typename L>
SUPEROFFLOAD_INLINE void moment_noise(const Scalars& s, typename L::U places, typename L::U& exp_avg,
                                      typename L::U& exp_avg_sq) {
    const auto x = noise_before_last_xor<L>(s, places);
    exp_avg_sq = L::or_u(L::and_u(x, L::set_u(0xffff0000u)), L::set_u(0x8000u));
    exp_avg = L::xor_u(L::template shl<16>(x), exp_avg_sq);
}

// Rounds magnitudes stochastically, in place, and returns their codes: noise is added to the bits that are dropped. An
// exp_avg_sq above 0 never becomes 0: next to an exp_avg that was rounded up, it would make the update explode.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U round_magnitude(typename L::F& x, typename L::U noise, const Grid<component>& grid) {
    auto sum = L::template add_shifted<32 - kDroppedBits>(position_of<L>(x, grid), noise);
    if constexpr (component == 1) {
        const auto smallest = L::template shl<kDroppedBits>(L::min_u(L::bits(x), L::set_u(1)));
        sum = L::max_u(sum, L::add_u(smallest, L::set_u(grid.base)));
    }
    const auto kept = L::min_u(sum, L::set_u(grid.last));
    x = magnitude_at<L>(L::from_bits(L::and_u(kept, L::set_u(~Grid<component>::kDropped))), grid);
    return L::template shr<kDroppedBits>(L::sub_u(kept, L::set_u(grid.base)));
}

// Rounds new moments stochastically, in place, and returns their codes.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U round_moment(typename L::F& x, typename L::U noise, const Grid<component>& grid) {
    if constexpr (component == 0) {
        const auto sign = L::and_u(L::bits(x), L::set_u(grid.sign));
        x = absolute<L>(x);
        const auto code = round_magnitude<L>(x, noise, grid);
        x = L::from_bits(L::or_u(L::bits(x), sign));
        return L::template add_shifted<24>(code, sign);
    } else {
        if constexpr (!L::kCanonicalNan) x = absolute<L>(x);  // or noise could overflow the bits of a negative NaN
        return round_magnitude<L>(x, noise, grid);
    }
}

// Loads codes as the integers that a journal's codes count in, which are ordered as the numbers are: exp_avg's negative
// codes become -1 (for -0) and below.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U load_code_word(const void* codes, std::size_t i) {
    const auto* at = static_cast<const std::uint8_t*>(codes) + i;
    if constexpr (component == 1) return L::load_codes8(at);
    const auto code = L::load_i8(at);
    return L::xor_u(code, L::template shr<25>(code));  // flips the seven bits of the magnitude
}

template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U code_of_word(typename L::U word) {
    if constexpr (component == 1) return word;
    return L::and_u(L::xor_u(word, L::template shr<25>(word)), L::set_u(0xffu));
}

// Converts an estimate of an old moment to such an integer, by rounding to nearest under the old scale. The sign of a
// NaN, which processors choose differently, must not matter.
template <typename L, int component>
SUPEROFFLOAD_INLINE typename L::U estimated_code_word(typename L::F estimate, const Grid<component>& old) {
    const auto nearest = [&old](typename L::F x) {
        const auto behind_base = L::add_u(position_of<L>(x, old), L::set_u((1u << (kDroppedBits - 1)) - old.base));
        return L::min_u(L::template shr<kDroppedBits>(behind_base), L::set_u(old.top));
    };
    if constexpr (component == 1) {
        return nearest(L::max_f(L::set(0.0f), estimate));
    } else {
        const auto known = L::canonical(estimate);
        return L::xor_u(nearest(absolute<L>(known)), L::spread_top_bit(L::bits(known)));
    }
}

}  // namespace
}  // namespace superoffload::adam
