// Holds a bucket in guarded memory with reproducible contents, and the kernels' results.
#pragma once

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
          arena_{words_.as<std::uint32_t>(), arena_words, 0} {
        reset();
    }

    // Restores the first contents, and an empty journal.
    void reset() {
        Random random(case_.seed * 1000003 + case_.numel);
        std::memset(shadow_.data(), 0, shadow_.size());
        for (std::size_t i = 0; i < case_.numel; ++i) fill(random, i);
        for (std::size_t i = 0; i < blocks_of(case_.numel); ++i) {
            blocks_.as<adam::JournalBlock>()[i] = {adam::JournalBlock::kNotApplied, {}, 0, {}};
        }
        arena_.used = 0;
    }

    adam::Run run(const adam::Scalars& scalars) {
        return {master_.data(),      exp_avg_.data(),
                exp_avg_sq_.data(),  gradient_.data(),
                shadow_.data(),      {codes_.data(), blocks_.as<adam::JournalBlock>(), &arena_, case_.width},
                case_.numel,         case_.gradient,
                case_.shadow,        scalars,
                case_.state,         case_.seed * 5,
                case_.split,         case_.split ? kept_.as<std::uint16_t>() : nullptr,
                case_.numel % 2 == 0};  // half of all cases bypass the caches
    }
    // Returns the run of the pass that follows a publish: the shadow is written already.
    adam::Run settling(const adam::Scalars& scalars) {
        adam::Run settling = run(scalars);
        settling.shadow = nullptr;
        return settling;
    }
    adam::Range all() const { return {0, case_.numel}; }

    std::vector<std::uint8_t> state() const {
        if (case_.split) return joined({&master_, &exp_avg_, &exp_avg_sq_, &shadow_});
        return joined({&master_, &exp_avg_, &exp_avg_sq_});
    }
    // Returns what a publish must leave as it is.
    std::vector<std::uint8_t> unpublished() const { return joined({&master_, &exp_avg_, &exp_avg_sq_}); }
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
        for (Guarded* memory :
             {&master_, &exp_avg_, &exp_avg_sq_, &gradient_, &shadow_, &kept_, &codes_, &blocks_, &words_}) {
            clean = memory->intact() && clean;
        }
        return clean;
    }

    adam::JournalArena& arena() { return arena_; }
    const adam::JournalBlock& block(std::size_t i) { return blocks_.as<adam::JournalBlock>()[i]; }
    // Returns an element of exp_avg (0), exp_avg_sq (1) or master (2), exactly.
    float value(int component, std::size_t i) {
        Guarded& memory = component == 0 ? exp_avg_ : component == 1 ? exp_avg_sq_ : master_;
        std::uint32_t word;
        if (component == 2 && case_.split) {
            const std::uint32_t upper = std::uint32_t{shadow_.as<std::uint16_t>()[i]} << 16;
            word = upper + static_cast<std::uint32_t>(std::int32_t{memory.as<std::int16_t>()[i]});
        } else if (component == 2 || case_.state == ElementType::f32) {
            return memory.as<float>()[i];
        } else {
            word = std::uint32_t{memory.as<std::uint16_t>()[i]} << 16;
        }
        float x;
        std::memcpy(&x, &word, sizeof x);
        return x;
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

    void fill(Random& random, std::size_t i) {
        if (case_.contents == Contents::trained) {
            const float g = random.unit() * 0x1p-6f;
            const float drift = 1 + random.unit() * 0.25f;
            put_master(i, bits_of(random.unit() * 0.125f));
            put(exp_avg_, i, bits_of(g * drift * 0.5f), case_.state);
            put(exp_avg_sq_, i, bits_of(g * g * drift), case_.state);
            put(gradient_, i, bits_of(g * (1 + random.unit() * 0.5f)), case_.gradient);
        } else {
            put_master(i, hostile(random));
            put(exp_avg_, i, hostile(random), case_.state);
            put(exp_avg_sq_, i, hostile(random), case_.state);
            put(gradient_, i, hostile(random), case_.gradient);
        }
    }

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
        if (choice == 1) return (word & 0x807fffffu) | (100 + (word >> 24) % 40) << 23;  // near 1
        return word;
    }

    // Two-byte types take the upper half: for bf16 the value itself, for fp16 another pattern, which serves as well.
    static void put(Guarded& memory, std::size_t i, std::uint32_t word, ElementType type) {
        if (type == ElementType::f32) {
            std::memcpy(memory.data() + 4 * i, &word, 4);
        } else {
            const auto half = static_cast<std::uint16_t>(word >> 16);
            std::memcpy(memory.data() + 2 * i, &half, 2);
        }
    }

    Case case_;
    Guarded master_, exp_avg_, exp_avg_sq_, gradient_, shadow_, kept_, codes_, blocks_, words_;
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
