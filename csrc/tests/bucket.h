// Holds a bucket in guarded memory with reproducible contents, and the kernels' results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "arm_adam/adam.h"
#include "guarded.h"

namespace harness {

using superoffload::adam::ElementType;
namespace adam = superoffload::adam;

// Makes the same words on every machine and compiler (SplitMix64).
class Random {
   public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    std::uint32_t below(std::uint32_t limit) { return static_cast<std::uint32_t>((next() >> 32) * limit >> 32); }
    // Returns an exactly representable number in (-1, 1).
    float unit() { return static_cast<float>(static_cast<std::int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }

   private:
    std::uint64_t state_;
};

inline std::uint32_t bits_of(float x) {
    std::uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}

inline float float_of(std::uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}

// Selects the contents: as in training, or raw bit patterns with every kind of special value among them.
enum class Contents { trained, hostile };

struct Case {
    std::size_t numel = 0;
    std::size_t offset = 0;  // of the first element, in elements past a 64-byte boundary
    ElementType gradient = ElementType::bf16;
    ElementType shadow = ElementType::bf16;
    ElementType state = ElementType::f32;  // type of the moments
    bool split = false;                    // of the master; then the shadow is bf16
    bool l2 = false;
    std::uint8_t width = 1;
    Contents contents = Contents::trained;
    std::uint64_t seed = 0;

    std::string text() const {
        return "numel=" + std::to_string(numel) + " offset=" + std::to_string(offset) +
               " gradient=" + std::to_string(static_cast<int>(gradient)) +
               " shadow=" + std::to_string(static_cast<int>(shadow)) +
               " state=" + std::to_string(static_cast<int>(state)) + " split=" + std::to_string(split) +
               " l2=" + std::to_string(l2) + " width=" + std::to_string(width) +
               " contents=" + (contents == Contents::trained ? "trained" : "hostile") + " seed=" + std::to_string(seed);
    }
};

inline std::size_t blocks_of(std::size_t numel) { return (numel + adam::kBlock - 1) / adam::kBlock; }

// Returns how many scales 8-bit moments have; others have none.
inline std::size_t scales_of(const Case& c) {
    return c.state == ElementType::q8 ? (c.numel + adam::kMomentBlock - 1) / adam::kMomentBlock : 0;
}

// Says what an 8-bit code means, by the definition: exponent and fraction bits, and perhaps a sign above them.
struct CodeFormat {
    int exponent, fraction;

    // Decodes a magnitude. NaN has one pattern: the scale of NaN with code 0.
    float value(std::uint32_t code, int scale) const {
        if (scale == 255) return float_of(0x7fc00000u | code);
        const int binade = static_cast<int>(code) >> fraction & ((1 << exponent) - 1);
        const int digits = static_cast<int>(code) & ((1 << fraction) - 1);
        const int lowest = std::max(scale, 1 << exponent) - 127 - ((1 << exponent) - 1);
        return std::ldexp(static_cast<float>(binade == 0 ? digits : digits + (1 << fraction)),
                          lowest + std::max(binade, 1) - fraction);
    }
    // Returns the largest code that is not above a magnitude.
    std::uint32_t code(float magnitude, int scale) const {
        std::uint32_t code = 0;
        for (std::uint32_t bit = 1u << (exponent + fraction - 1); bit != 0; bit >>= 1) {
            if (value(code | bit, scale) <= magnitude) code |= bit;
        }
        return code;
    }
};
constexpr CodeFormat kMomentFormats[2] = {{4, 3}, {5, 3}};  // exp_avg, which has a sign, and exp_avg_sq

// Returns the room that all elements of all components need to escape.
inline std::size_t full_arena(std::size_t numel) { return 3 * numel + (3 * numel + 1) / 2 + blocks_of(numel); }

class Bucket {
   public:
    explicit Bucket(const Case& c) : Bucket(c, full_arena(c.numel)) {}

    Bucket(const Case& c, std::size_t arena_words)
        : case_(c),
          master_((c.split ? 2 : 4) * c.numel, (c.split ? 2 : 4) * c.offset),
          exp_avg_(adam::element_size(c.state) * c.numel, adam::element_size(c.state) * c.offset),
          exp_avg_sq_(adam::element_size(c.state) * c.numel, adam::element_size(c.state) * c.offset),
          gradient_(adam::element_size(c.gradient) * c.numel, adam::element_size(c.gradient) * c.offset),
          shadow_(adam::element_size(c.shadow) * c.numel, adam::element_size(c.shadow) * c.offset),
          kept_(2 * c.numel, 2 * c.offset),
          codes_(c.width * c.numel, c.offset),
          blocks_(blocks_of(c.numel) * sizeof(adam::JournalBlock)),
          words_(4 * arena_words),
          scales_m_(scales_of(c), c.offset),
          scales_v_(scales_of(c), c.offset + 1),
          arena_{words_.as<std::uint32_t>(), arena_words, 0} {
        reset();
    }

    // Restores the first contents, and an empty journal.
    void reset() {
        Random random(case_.seed * 1000003 + case_.numel);
        std::memset(shadow_.data(), 0, shadow_.size());
        for (std::size_t i = 0; i < scales_of(case_); ++i) fill_scales(random, i);
        for (std::size_t i = 0; i < case_.numel; ++i) fill(random, i);
        for (std::size_t i = 0; i < blocks_of(case_.numel); ++i) {
            blocks_.as<adam::JournalBlock>()[i] = {adam::JournalBlock::kNotApplied, {}, 0, {}};
        }
        arena_.used = 0;
    }

    adam::Run run(const adam::Scalars& scalars) {
        const bool quantized = case_.state == ElementType::q8;
        return {master_.data(),
                exp_avg_.data(),
                exp_avg_sq_.data(),
                gradient_.data(),
                shadow_.data(),
                {codes_.data(), blocks_.as<adam::JournalBlock>(), &arena_, case_.width},
                case_.numel,
                case_.gradient,
                case_.shadow,
                scalars,
                case_.state,
                case_.seed * 5,
                0,
                0,
                {},
                nullptr,
                case_.split,
                case_.split ? kept_.as<std::uint16_t>() : nullptr,
                case_.numel % 2 == 0,  // half of all cases bypass the caches
                quantized ? scales_m_.data() : nullptr,
                quantized ? scales_v_.data() : nullptr};
    }
    // Returns the run of the pass that follows a publish: the shadow is written already.
    adam::Run settling(const adam::Scalars& scalars) {
        adam::Run settling = run(scalars);
        settling.shadow = nullptr;
        return settling;
    }
    adam::Range all() const { return {0, case_.numel}; }

    std::vector<std::uint8_t> state() const {
        if (case_.split) return joined({&master_, &exp_avg_, &exp_avg_sq_, &scales_m_, &scales_v_, &shadow_});
        return unpublished();
    }
    // Returns what a publish must leave as it is.
    std::vector<std::uint8_t> unpublished() const {
        return joined({&master_, &exp_avg_, &exp_avg_sq_, &scales_m_, &scales_v_});
    }
    std::vector<std::uint8_t> shadow() const { return shadow_.bytes(); }
    // Returns all defined parts of a journal; codes of escaped lanes may have any value, so they are left out.
    std::vector<std::uint8_t> escapes() const {
        std::vector<std::uint8_t> all = blocks_.bytes();
        const std::vector<std::uint8_t> words = words_.bytes();
        all.insert(all.end(), words.begin(), words.begin() + static_cast<std::ptrdiff_t>(4 * arena_.used));
        return all;
    }
    bool intact() {
        bool clean = true;
        for (Guarded* memory : {&master_, &exp_avg_, &exp_avg_sq_, &gradient_, &shadow_, &kept_, &codes_, &blocks_,
                                &words_, &scales_m_, &scales_v_}) {
            clean = memory->intact() && clean;
        }
        return clean;
    }

    adam::JournalArena& arena() { return arena_; }
    const adam::JournalBlock& block(std::size_t i) { return blocks_.as<adam::JournalBlock>()[i]; }
    // Returns an element of exp_avg (0), exp_avg_sq (1) or master (2), exactly.
    float value(int component, std::size_t i) {
        Guarded& memory = component == 0 ? exp_avg_ : component == 1 ? exp_avg_sq_ : master_;
        if (component != 2 && case_.state == ElementType::q8) return moment(component, memory.data()[i], i);
        std::uint32_t word;
        if (component == 2 && case_.split) {
            const std::uint32_t upper = std::uint32_t{shadow_.as<std::uint16_t>()[i]} << 16;
            word = upper + static_cast<std::uint32_t>(std::int32_t{memory.as<std::int16_t>()[i]});
        } else if (component == 2 || case_.state == ElementType::f32) {
            return memory.as<float>()[i];
        } else {
            word = std::uint32_t{memory.as<std::uint16_t>()[i]} << 16;
        }
        return float_of(word);
    }
    const void* gradient() { return gradient_.data(); }

   private:
    static std::vector<std::uint8_t> joined(std::initializer_list<const Guarded*> parts) {
        std::vector<std::uint8_t> all;
        for (const Guarded* part : parts) {
            const std::vector<std::uint8_t> bytes = part->bytes();
            all.insert(all.end(), bytes.begin(), bytes.end());
        }
        return all;
    }

    float moment(int component, std::uint32_t code, std::size_t i) {
        const int scale = (component == 0 ? scales_m_ : scales_v_).data()[i / adam::kMomentBlock];
        if (component == 1) return kMomentFormats[1].value(code, scale);
        const float magnitude = kMomentFormats[0].value(scale == 255 ? code : code & 0x7fu, scale);
        return code < 0x80u || scale == 255 ? magnitude : -magnitude;
    }

    // Trained moments are below 2^-6, and below 2^-11.
    void fill_scales(Random& random, std::size_t i) {
        static const std::uint8_t special[] = {0, 1, 16, 17, 32, 33, 254, 255};
        const bool trained = case_.contents == Contents::trained;
        for (Guarded* scales : {&scales_m_, &scales_v_}) {
            const auto word = static_cast<std::uint32_t>(random.next());
            const auto hostile = word % 3 == 0 ? special[word >> 29] : static_cast<std::uint8_t>(word >> 24);
            scales->data()[i] = trained ? static_cast<std::uint8_t>(scales == &scales_m_ ? 120 : 115) : hostile;
        }
    }

    void fill(Random& random, std::size_t i) {
        if (case_.contents == Contents::trained) {
            const float g = random.unit() * 0x1p-6f;
            const float drift = 1 + random.unit() * 0.25f;
            put_master(i, bits_of(random.unit() * 0.125f));
            put_moments(i, g * drift * 0.5f, g * g * drift);
            put(gradient_, i, bits_of(g * (1 + random.unit() * 0.5f)), case_.gradient);
        } else {
            put_master(i, tamed(hostile(random), i));
            put(exp_avg_, i, hostile(random), case_.state);
            put(exp_avg_sq_, i, hostile(random), case_.state);
            put(gradient_, i, tamed(hostile(random), i), case_.gradient);
        }
    }

    void put_moments(std::size_t i, float first, float second) {
        if (case_.state == ElementType::q8) {
            const std::uint32_t sign = first < 0 ? 0x80u : 0u;
            exp_avg_.data()[i] = static_cast<std::uint8_t>(kMomentFormats[0].code(std::abs(first), 120) | sign);
            exp_avg_sq_.data()[i] = static_cast<std::uint8_t>(kMomentFormats[1].code(second, 115));
        } else {
            put(exp_avg_, i, bits_of(first), case_.state);
            put(exp_avg_sq_, i, bits_of(second), case_.state);
        }
    }

    // One NaN makes a whole block of 8-bit moments NaN, and one huge number hides the others. So of three blocks one
    // has anything in it, one nothing that is infinite or NaN in any type, and one only what is near 1.
    std::uint32_t tamed(std::uint32_t word, std::size_t i) const {
        const std::size_t kind = case_.state == ElementType::q8 ? (case_.seed + i / adam::kMomentBlock) % 3 : 0;
        if (kind == 1 && (word & 0x7c000000u) == 0x7c000000u) return word & ~0x40000000u;
        return kind == 2 ? near_one(word) : word;
    }
    static std::uint32_t near_one(std::uint32_t word) { return (word & 0x807fffffu) | (100 + (word >> 24) % 40) << 23; }

    // Splits a word as the definition says: the upper half rounded to nearest, ties away, and the signed rest.
    void put_master(std::size_t i, std::uint32_t word) {
        if (!case_.split) {
            put(master_, i, word, ElementType::f32);
            return;
        }
        const std::uint32_t upper = (word + 0x8000u) >> 16;
        put(shadow_, i, upper << 16, ElementType::bf16);
        put(master_, i, (word - (upper << 16)) << 16, ElementType::bf16);
    }

    static std::uint32_t hostile(Random& random) {
        static const std::uint32_t special[] = {
            0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u, 0x00400000u, 0x007fffffu, 0x00800000u, 0x3f800000u,
            0x7f7fffffu, 0xff7fffffu, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x33800000u,
        };
        const std::uint32_t choice = random.below(4);
        const auto word = static_cast<std::uint32_t>(random.next());
        if (choice == 0) return special[word % 16];
        if (choice == 1) return near_one(word);
        return word;
    }

    // Two-byte types take the upper half: for bf16 the value itself, for fp16 another pattern, which serves as well.
    // One-byte types take any byte.
    static void put(Guarded& memory, std::size_t i, std::uint32_t word, ElementType type) {
        if (type == ElementType::f32) {
            std::memcpy(memory.data() + 4 * i, &word, 4);
        } else if (type == ElementType::q8) {
            memory.data()[i] = static_cast<std::uint8_t>(word >> 11);
        } else {
            const auto half = static_cast<std::uint16_t>(word >> 16);
            std::memcpy(memory.data() + 2 * i, &half, 2);
        }
    }

    Case case_;
    Guarded master_, exp_avg_, exp_avg_sq_, gradient_, shadow_, kept_, codes_, blocks_, words_, scales_m_, scales_v_;
    adam::JournalArena arena_;
};

// Makes hyper-parameters that cover every edge of the arithmetic.
inline adam::Hyper hyper_of(std::uint64_t seed, bool l2) {
    adam::Hyper h{1e-3, 0.9, 0.999, 1e-8, 1e-2, 100 + seed % 50, 1.0, l2};
    switch (seed % 11) {
        case 1:
            h.step = 1;
            break;
        case 2:
            h.lr = 0;
            break;
        case 3:
            h.weight_decay = 0;
            break;
        case 4:
            h.eps = 0;
            break;
        case 5:
            h.gradient_factor = 0.37;
            break;
        case 6:
            h.gradient_factor = 0x1p-16;
            break;
        case 7:
            h.beta1 = 0;
            break;
        case 8:
            h.lr = 1, h.weight_decay = 1;
            break;  // 1 - lr * weight_decay = 0: no estimate is possible
        case 9:
            h.gradient_factor = 0;
            break;
        case 10:
            h.lr = 3e4, h.step = 1000000;
            break;
        default:
            break;
    }
    return h;
}

}  // namespace harness
