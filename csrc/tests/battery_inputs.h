// Makes the battery's cases and their inputs from an integer hash, so they are the same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "arm_adam/adam.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace battery {

using superoffload::adam::ElementType;
using superoffload::adam::Hyper;

struct Case {
    unsigned number;
    std::size_t numel;
    std::size_t offset;  // in elements from an aligned start
    ElementType gradient;
    ElementType shadow;
    ElementType state;  // type of the moments
    bool split;         // of the master; then the shadow is bf16
    Hyper hyper;
    bool hostile;
    unsigned environment;
};

inline std::uint64_t mix(std::uint64_t x) {
    x = (x + 0x9e3779b97f4a7c15u) * 0xf1357aea2e62a9c5u;
    x = (x ^ (x >> 31)) * 0xd1342543de82ef95u;
    return x ^ (x >> 29);
}

// Takes edge cases in turn: first step, plain, no decay, lr = 0, eps = 0, a beta of zero, a decay factor of zero, betas
// next to one, huge and tiny scalars (both with fp32 denormals among them), and a gradient factor of zero.
inline Hyper hyper(unsigned number) {
    static const Hyper kHypers[] = {
        {1e-3, 0.9, 0.999, 1e-8, 1e-2, 1, 1.0, false},
        {1e-3, 0.9, 0.999, 1e-8, 1e-2, 12, 0.37, false},
        {3e-4, 0.9, 0.95, 1e-8, 0.0, 2000, 1.0 / 65536, false},
        {0.0, 0.9, 0.999, 1e-8, 1e-2, 9, 1.0, false},
        {1e-3, 0.9, 0.999, 0.0, 1e-2, 5, 1.0, false},
        {0.5, 0.0, 0.999, 1e-8, 1e-2, 3, 1.0, false},
        {0.5, 0.9, 0.0, 1e-8, 2.0, 30, 1.0, false},
        {1e-3, 1 - 1.0 / (1 << 30), 1 - 1.0 / (std::int64_t{1} << 50), 1e-8, 1e-2, 7, 1.0, false},
        {1e20, 0.9, 0.999, 1e-42, 1e10, 100, 1e18, false},
        {1e-40, 0.5, 0.5, 1e30, 1e-41, 2, 1e-41, false},
        {1e-2, 0.9, 0.999, 1e-8, 1e-2, 1, 0.0, false},
        {1e-3, 0.9, 0.999, 1e-8, 1e-2, 300, 30.0, false},
    };
    return kHypers[number % (sizeof kHypers / sizeof *kHypers)];
}

inline Case make_case(unsigned number, std::size_t numel) {
    const std::uint64_t bits = mix(number);
    const bool split = number / 54 % 2 == 1;
    Case c{number,
           numel,
           static_cast<std::size_t>(bits >> 60),
           static_cast<ElementType>(number % 3),
           split ? ElementType::bf16 : static_cast<ElementType>(number / 3 % 3),
           number / 18 % 3 == 1   ? ElementType::q8
           : number / 18 % 3 == 2 ? ElementType::bf16
                                  : ElementType::f32,
           split,
           hyper(static_cast<unsigned>(mix(bits) >> 32)),
           (bits >> 32) % 3 != 0,
           static_cast<unsigned>(bits >> 40) % 4};
    c.hyper.l2 = number / 9 % 2 == 1;
    return c;
}

// Lists the cases. Short: every length up to 80 and those around blocks, with all types, both modes, and whole and
// split masters in turn. Full: every length past the end of a block of 1024, those around the ends of three more, and
// the short ones more often. (A test of its own checks that the sets of one machine agree at every length up to 4096.)
inline std::vector<Case> cases(bool full) {
    std::vector<Case> all;
    const auto add = [&](std::size_t numel) { all.push_back(make_case(static_cast<unsigned>(all.size()), numel)); };
    for (int repeat = 0; repeat < (full ? 36 : 18); ++repeat) {
        for (std::size_t numel = 0; numel <= 80; ++numel) add(numel);
    }
    if (full) {
        for (std::size_t numel = 81; numel <= 1100; ++numel) add(numel);
        for (std::size_t end = 2048; end <= 4096; end += 1024) {
            for (std::size_t numel = end - 17; numel <= end + 17; ++numel) add(numel);
        }
    }
    // An odd number of lengths that is no multiple of 3 meets other types in each turn.
    for (int repeat = 0; repeat < 40; ++repeat) {
        for (const std::size_t numel : {127, 255, 256, 700, 1000, 1023, 1024, 1025, 1031, 2047, 3100}) add(numel);
    }
    return all;
}

// Places a run in a whole parameter: as one run, or along one to three axes, with rows around the lengths of vectors.
inline void place(superoffload::adam::Run& run, unsigned number) {
    static const superoffload::adam::Axis kAxes[][3] = {{{3, 1}, {7, 11}, {1 << 20, 500}},
                                                        {{16, 1}, {40, 48}, {1 << 20, 4096}},
                                                        {{1000, 1}, {1 << 20, 5000}, {1, 0}},
                                                        {{33, 70}, {5, 1}, {1 << 20, 5 * 70 * 33 + 9}},
                                                        {{1 << 30, 48}, {1, 0}, {1, 0}}};
    static const unsigned kCounts[] = {3, 3, 2, 3, 1};
    run.first_index = mix(number) >> 24;  // above 2^32 too
    run.start = static_cast<std::uint32_t>(mix(number + 1));
    const unsigned shape = number % 11;
    if (shape >= 5) return;
    run.first_index >>= 16;  // within all axes
    run.axis_count = kCounts[shape];
    for (unsigned k = 0; k < run.axis_count; ++k) run.axes[k] = kAxes[shape][k];
}

constexpr std::uint32_t kSpecial[] = {
    0x00000000, 0x00000001, 0x00000fff, 0x00400000, 0x007fffff, 0x00800000, 0x00800001, 0x0c800000, 0x20000000,
    0x33000000, 0x337fffff, 0x33800000, 0x387fc000, 0x387fe000, 0x38800000, 0x3f7fffff, 0x3f800000, 0x3f800001,
    0x3f808000, 0x3f818000, 0x3f808001, 0x3f801000, 0x3f803000, 0x477fe000, 0x477fefff, 0x477ff000, 0x47800000,
    0x7f000000, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fc12345};

// Makes a number of either sign with a binary exponent from low to low + span - 1.
inline std::uint32_t plain_word(std::uint64_t bits, std::uint32_t low, std::uint32_t span) {
    return (static_cast<std::uint32_t>(bits) & 0x807fffffu) |
           ((127 + low + static_cast<std::uint32_t>(bits >> 40) % span) << 23);
}

inline std::uint32_t hostile_word(std::uint64_t bits) {
    const auto raw = static_cast<std::uint32_t>(bits);
    switch ((bits >> 56) % 10) {
        case 0:
            return kSpecial[(bits >> 33) % (sizeof kSpecial / sizeof *kSpecial)] | (raw & 0x80000000u);
        case 1:
        case 2:  // denormals
            return raw & 0x807fffffu;
        case 3:
        case 4:
            return raw;
        case 5:
        case 6:  // few significant bits, and their neighbours: ties of rounding
            return (((raw & 0x80ffffffu) | 0x3b000000u) & 0xffff8000u) + static_cast<std::uint32_t>(bits >> 36) % 3 - 1;
        default:
            return plain_word(bits, 0u - 12, 8);
    }
}

inline std::uint32_t gradient_word(const Case& c, std::uint64_t bits) {
    if (c.gradient == ElementType::f32) return c.hostile ? hostile_word(bits) : plain_word(bits, 0u - 14, 5);
    if (c.hostile && (bits >> 50) % 4 != 0) return static_cast<std::uint32_t>(bits) & 0xffffu;
    const std::uint32_t word = plain_word(bits, 0u - 14, 5);
    if (c.gradient == ElementType::bf16) return word >> 16;
    return ((word >> 16) & 0x8000u) | ((word & 0x7fffffffu) - 0x38000000u) >> 13;
}

inline std::size_t scales_of(const Case& c) {
    constexpr std::size_t block = superoffload::adam::kMomentBlock;
    return c.state == ElementType::q8 ? (c.numel + block - 1) / block : 0;
}

// Fills the scales of 8-bit moments: any byte, often an edge, or those of the plain numbers that codes stand for.
inline void fill_scales(const Case& c, std::uint8_t* exp_avg_scales, std::uint8_t* exp_avg_sq_scales) {
    static const std::uint8_t kEdges[] = {0, 1, 16, 17, 32, 33, 254, 255};
    for (std::size_t i = 0; i < scales_of(c); ++i) {
        const std::uint64_t bits = mix((std::uint64_t{c.number} << 32) + 0x80000000u + i);
        const auto hostile = [](std::uint64_t word) {
            return word % 3 == 0 ? kEdges[word >> 8 & 7] : static_cast<std::uint8_t>(word >> 16);
        };
        exp_avg_scales[i] = c.hostile ? hostile(bits) : std::uint8_t{127 - 11};
        exp_avg_sq_scales[i] = c.hostile ? hostile(bits >> 32) : std::uint8_t{127 - 23};
    }
}

// Makes codes of the plain numbers that moments have in other cases: four binades, and five.
inline std::uint32_t moment_code(const Case& c, bool second, std::uint64_t bits) {
    const auto word = static_cast<std::uint32_t>(bits >> 32);
    if (c.hostile) return word & 0xffu;
    return second ? 0xd8u + word % 40 : (word & 0x80u) | (0x60u + word % 32);
}

// One NaN makes a whole block of 8-bit moments NaN, and one huge number hides the others. So masters and gradients of
// one block in three have anything in them, of one nothing that is infinite or NaN, of one numbers between 2^-31 and 2.
inline std::uint32_t tamed(const Case& c, std::size_t i, std::uint32_t word, std::uint32_t exponent) {
    const std::size_t kind = c.number / 108 + i / superoffload::adam::kMomentBlock;
    if (c.state != ElementType::q8 || !c.hostile || kind % 3 == 0) return word;
    const std::uint32_t highest = exponent & ~(exponent >> 1);
    if (kind % 3 == 1) return (word & exponent) == exponent ? word & ~highest : word;
    return (word & ~highest) | highest >> 1 | highest >> 2;
}

inline std::uint32_t exponent_bits(ElementType type) {
    return type == ElementType::f32 ? 0x7f800000u : type == ElementType::bf16 ? 0x7f80u : 0x7c00u;
}

// Fills the state and gradient of a case, with fp32 masters; `c.hyper` plays no part.
inline void fill(const Case& c, std::uint8_t* master, std::uint8_t* exp_avg, std::uint8_t* exp_avg_sq,
                 std::uint8_t* gradient) {
    const std::size_t size = superoffload::adam::element_size(c.gradient);
    const std::size_t moment = superoffload::adam::element_size(c.state);
    const int dropped = c.state == ElementType::bf16 ? 16 : 0;
    const bool quantized = c.state == ElementType::q8;
    for (std::size_t i = 0; i < c.numel; ++i) {
        const std::uint64_t seed = (std::uint64_t{c.number} << 32) + 4 * i;
        const std::uint64_t bits[4] = {mix(seed), mix(seed + 1), mix(seed + 2), mix(seed + 3)};
        const std::uint32_t words[3] = {
            c.hostile ? tamed(c, i, hostile_word(bits[0]), 0x7f800000u) : plain_word(bits[0], 0u - 9, 7),
            c.hostile ? hostile_word(bits[1]) : plain_word(bits[1], 0u - 14, 4),
            c.hostile ? hostile_word(bits[2]) : plain_word(bits[2], 0u - 27, 5) & 0x7fffffffu};
        const std::uint32_t first = quantized ? moment_code(c, false, bits[1]) : words[1] >> dropped;
        const std::uint32_t second = quantized ? moment_code(c, true, bits[2]) : words[2] >> dropped;
        const std::uint32_t g = tamed(c, i, gradient_word(c, bits[3]), exponent_bits(c.gradient));
        std::memcpy(master + 4 * i, &words[0], 4);
        std::memcpy(exp_avg + moment * i, &first, moment);
        std::memcpy(exp_avg_sq + moment * i, &second, moment);
        std::memcpy(gradient + size * i, &g, size);
    }
}

// Splits fp32 masters as the definition says: upper halves rounded to nearest, ties away from zero, and signed rests. A
// NaN keeps its bits, as undo must.
inline void split(const std::uint8_t* master, std::size_t numel, std::uint16_t* upper, std::int16_t* rest) {
    for (std::size_t i = 0; i < numel; ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, master + 4 * i, 4);
        upper[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
        rest[i] = static_cast<std::int16_t>(bits - (std::uint32_t{upper[i]} << 16));
    }
}

// Sets an environment as a caller may have: 0 the default, 1 flush-to-zero, 2 that and the processor's other ways to
// change results, 3 rounding toward zero.
class CallerEnvironment {
   public:
    explicit CallerEnvironment(unsigned kind) : saved_(get()) {
#if defined(__x86_64__)
        const std::uint64_t kinds[4] = {0x1f80, 0x9f80, 0xdfc0, 0x7f80};
#else
        const std::uint64_t kinds[4] = {0, 1u << 24, 1u << 24 | 1u << 25 | 1u << 19 | 1u << 26 | 1u << 22, 3u << 22};
#endif
        set(kinds[kind]);
        set_ = get();
    }
    ~CallerEnvironment() { set(saved_); }
    CallerEnvironment(const CallerEnvironment&) = delete;
    CallerEnvironment& operator=(const CallerEnvironment&) = delete;
    bool unchanged() const { return get() == set_; }

   private:
#if defined(__x86_64__)
    static std::uint64_t get() { return _mm_getcsr() & ~0x3fu; }  // without the sticky exception flags
    static void set(std::uint64_t x) { _mm_setcsr(static_cast<unsigned>(x)); }
#elif defined(__aarch64__)
    static std::uint64_t get() {
        std::uint64_t x;
        __asm__ volatile("mrs %0, fpcr" : "=r"(x));
        return x;
    }
    static void set(std::uint64_t x) { __asm__ volatile("msr fpcr, %0" : : "r"(x)); }
#else
    static std::uint64_t get() { return 0; }
    static void set(std::uint64_t) {}
#endif
    std::uint64_t saved_;
    std::uint64_t set_ = 0;
};

}  // namespace battery
