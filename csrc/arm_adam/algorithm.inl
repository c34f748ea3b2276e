// The algorithm, once. Each isa_*.cpp includes this file and instantiates it with its lane type; everything lives in
// an unnamed namespace, so that code compiled for one instruction set is never linked into another.
//
// A lane type L supplies vectors of L::width() elements: F (fp32), U (32-bit words), M (masks), and one function per
// IEEE operation. fma is written where the algorithm means a fused operation and nowhere else.
#pragma once

#include <cstring>
#include <type_traits>

#include "adam.h"
#include "escapes.h"
#include "kernels.h"
#include "lanes_scalar.h"

#define SUPEROFFLOAD_INLINE inline __attribute__((always_inline))

namespace superoffload::adam {
namespace {

template <typename L, ElementType type>
SUPEROFFLOAD_INLINE typename L::F load_element(const void* base, std::size_t i) {
    if constexpr (type == ElementType::f32) return L::load(static_cast<const float*>(base) + i);
    if constexpr (type == ElementType::bf16) return L::load_bf16(static_cast<const std::uint16_t*>(base) + i);
    if constexpr (type == ElementType::f16) return L::load_f16(static_cast<const std::uint16_t*>(base) + i);
}

template <typename L, ElementType type>
SUPEROFFLOAD_INLINE void store_element(void* base, std::size_t i, typename L::F x) {
    if constexpr (type == ElementType::f32) L::store(static_cast<float*>(base) + i, x);
    if constexpr (type == ElementType::bf16) L::store_bf16(static_cast<std::uint16_t*>(base) + i, x);
    if constexpr (type == ElementType::f16) L::store_f16(static_cast<std::uint16_t*>(base) + i, x);
}

// The gradient as it enters the moments.
template <typename L, bool l2>
SUPEROFFLOAD_INLINE typename L::F effective_gradient(const Scalars& s, typename L::F raw, typename L::F master) {
    const auto g = L::mul(raw, L::set(s.gradient_factor));
    if constexpr (l2) return L::fma(L::set(s.weight_decay), master, g);
    return g;
}

template <typename L>
SUPEROFFLOAD_INLINE typename L::F first_increment(const Scalars& s, typename L::F g) {
    return L::mul(L::set(s.one_minus_beta1), g);
}

template <typename L>
SUPEROFFLOAD_INLINE typename L::F second_increment(const Scalars& s, typename L::F g) {
    return L::mul(L::mul(L::set(s.one_minus_beta2), g), g);
}

// exp_avg / (sqrt(exp_avg_sq / bias_correction2) + eps), from the new moments
template <typename L>
SUPEROFFLOAD_INLINE typename L::F direction(const Scalars& s, typename L::F exp_avg, typename L::F exp_avg_sq) {
    return L::div(exp_avg, L::fma(L::sqrt(exp_avg_sq), L::set(s.inverse_sqrt_bias2), L::set(s.eps)));
}

template <typename L, bool l2>
SUPEROFFLOAD_INLINE typename L::F next_master(const Scalars& s, typename L::F master, typename L::F q) {
    if constexpr (l2) return L::fma(L::set(-s.step_size), q, master);
    return L::fma(L::set(-s.step_size), q, L::mul(master, L::set(s.decay)));
}

// The inverse arithmetic: what the old words most likely were. Step and undo compute the very same estimates.
template <typename L>
SUPEROFFLOAD_INLINE typename L::F estimate_exp_avg(const Scalars& s, typename L::F now, typename L::F increment) {
    return L::mul(L::sub(now, increment), L::set(s.inverse_beta1));
}

template <typename L>
SUPEROFFLOAD_INLINE typename L::F estimate_exp_avg_sq(const Scalars& s, typename L::F now, typename L::F increment) {
    return L::mul(L::sub(now, increment), L::set(s.inverse_beta2));
}

template <typename L, bool l2>
SUPEROFFLOAD_INLINE typename L::F estimate_master(const Scalars& s, typename L::F now, typename L::F q) {
    const auto undecayed = L::fma(L::set(s.step_size), q, now);
    if constexpr (l2) return undecayed;
    return L::mul(undecayed, L::set(s.inverse_decay));
}

// How a code divides its bits over the three components.
template <int width>
struct Code;
template <>
struct Code<1> {
    static constexpr int kBits[3] = {4, 2, 2};
};
template <>
struct Code<2> {
    static constexpr int kBits[3] = {7, 7, 2};
};

template <int width, int component>
constexpr std::uint32_t limit() {
    return 1u << Code<width>::kBits[component];
}
template <int width, int component>
constexpr std::uint32_t bias() {
    return limit<width, component>() / 2;
}
template <int width, int component>
constexpr int shift() {
    int position = 0;
    for (int i = 0; i < component; ++i) position += Code<width>::kBits[i];
    return position;
}

template <typename L, int width>
SUPEROFFLOAD_INLINE void store_codes(std::uint8_t* codes, std::size_t i, typename L::U x) {
    if constexpr (width == 1) L::store_codes8(codes + i, x);
    if constexpr (width == 2) L::store_codes16(codes + 2 * i, x);
}

template <typename L, int width>
SUPEROFFLOAD_INLINE typename L::U load_codes(const std::uint8_t* codes, std::size_t i) {
    if constexpr (width == 1) return L::load_codes8(codes + i);
    if constexpr (width == 2) return L::load_codes16(codes + 2 * i);
}

// One component's code; its lanes that do not fit go to the block's escape list.
template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::U encode(typename L::F old, typename L::F estimate, BlockEscapes& escapes,
                                         std::size_t index, std::uint32_t& narrow) {
    const auto raw = L::sub_u(L::bits(old), L::bits(estimate));
    const auto difference = L::add_u(raw, L::set_u(bias<width, component>()));
    const auto escaped = L::escapes(difference, limit<width, component>(), estimate);
    if (L::any(escaped)) {
        L::append(escapes.component[component], escaped, L::bits(old), static_cast<std::uint32_t>(index));
    }
    if constexpr (width == 2 && Code<2>::kBits[component] != Code<1>::kBits[component]) {
        const auto narrow_difference = L::add_u(raw, L::set_u(bias<1, component>()));
        narrow += L::count(L::escapes(narrow_difference, limit<1, component>(), estimate));
    }
    const auto code = L::and_u(difference, L::set_u(limit<width, component>() - 1));
    return L::template shl<shift<width, component>()>(code);
}

template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::F decode(typename L::U codes, typename L::F estimate) {
    const auto code = L::and_u(L::template shr<shift<width, component>()>(codes),
                               L::set_u(limit<width, component>() - 1));
    const auto difference = L::sub_u(code, L::set_u(bias<width, component>()));
    return L::from_bits(L::add_u(L::bits(estimate), difference));
}

template <typename L, ElementType gradient, ElementType shadow, bool l2>
SUPEROFFLOAD_INLINE void step_lanes(const Run& run, std::size_t begin, std::size_t end) {
    const Scalars s = run.frozen;
    for (std::size_t i = begin; i < end; i += L::width()) {
        const auto p = L::load(run.master + i);
        const auto g = effective_gradient<L, l2>(s, load_element<L, gradient>(run.gradient, i), p);
        const auto m = L::fma(L::set(s.beta1), L::load(run.exp_avg + i), first_increment<L>(s, g));
        const auto v = L::fma(L::set(s.beta2), L::load(run.exp_avg_sq + i), second_increment<L>(s, g));
        const auto next = L::canonical(next_master<L, l2>(s, p, direction<L>(s, m, v)));
        L::store(run.exp_avg + i, L::canonical(m));
        L::store(run.exp_avg_sq + i, L::canonical(v));
        L::store(run.master + i, next);
        store_element<L, shadow>(run.shadow, i, next);
    }
}

template <typename L, ElementType gradient, ElementType shadow, bool l2>
SUPEROFFLOAD_INLINE void publish_lanes(const Run& run, std::size_t begin, std::size_t end) {
    const Scalars s = run.frozen;
    for (std::size_t i = begin; i < end; i += L::width()) {
        const auto p = L::load(run.master + i);
        const auto g = effective_gradient<L, l2>(s, load_element<L, gradient>(run.gradient, i), p);
        const auto m = L::fma(L::set(s.beta1), L::load(run.exp_avg + i), first_increment<L>(s, g));
        const auto v = L::fma(L::set(s.beta2), L::load(run.exp_avg_sq + i), second_increment<L>(s, g));
        store_element<L, shadow>(run.shadow, i, L::canonical(next_master<L, l2>(s, p, direction<L>(s, m, v))));
    }
}

template <typename L, ElementType gradient, ElementType shadow, bool l2, int width>
SUPEROFFLOAD_INLINE void journal_lanes(const Run& run, std::size_t block, std::size_t begin, std::size_t end,
                                       BlockEscapes& escapes) {
    const Scalars s = run.frozen;
    std::uint32_t narrow = 0;
    for (std::size_t i = begin; i < end; i += L::width()) {
        const auto p = L::load(run.master + i);
        const auto m = L::load(run.exp_avg + i);
        const auto v = L::load(run.exp_avg_sq + i);
        const auto g = effective_gradient<L, l2>(s, load_element<L, gradient>(run.gradient, i), p);
        const auto first = first_increment<L>(s, g);
        const auto second = second_increment<L>(s, g);
        const auto next_m = L::fma(L::set(s.beta1), m, first);
        const auto next_v = L::fma(L::set(s.beta2), v, second);
        const auto q = direction<L>(s, next_m, next_v);
        const auto next_p = L::canonical(next_master<L, l2>(s, p, q));
        L::store(run.exp_avg + i, L::canonical(next_m));
        L::store(run.exp_avg_sq + i, L::canonical(next_v));
        L::store(run.master + i, next_p);
        store_element<L, shadow>(run.shadow, i, next_p);
        const std::size_t at = i - block;
        auto codes = encode<L, width, 0>(m, estimate_exp_avg<L>(s, next_m, first), escapes, at, narrow);
        codes = L::or_u(codes,
                        encode<L, width, 1>(v, estimate_exp_avg_sq<L>(s, next_v, second), escapes, at, narrow));
        codes = L::or_u(codes, encode<L, width, 2>(p, estimate_master<L, l2>(s, next_p, q), escapes, at, narrow));
        store_codes<L, width>(run.journal.codes, i, codes);
    }
    escapes.narrow += narrow;
}

// AdamW: all three components at once. The gradient does not depend on the master.
template <typename L, ElementType gradient, int width>
SUPEROFFLOAD_INLINE void undo_lanes(const Run& run, std::size_t begin, std::size_t end) {
    const Scalars s = run.frozen;
    for (std::size_t i = begin; i < end; i += L::width()) {
        const auto p = L::load(run.master + i);
        const auto m = L::load(run.exp_avg + i);
        const auto v = L::load(run.exp_avg_sq + i);
        const auto g = effective_gradient<L, false>(s, load_element<L, gradient>(run.gradient, i), p);
        const auto codes = load_codes<L, width>(run.journal.codes, i);
        const auto old_p = estimate_master<L, false>(s, p, direction<L>(s, m, v));
        L::store(run.exp_avg + i, decode<L, width, 0>(codes, estimate_exp_avg<L>(s, m, first_increment<L>(s, g))));
        L::store(run.exp_avg_sq + i,
                 decode<L, width, 1>(codes, estimate_exp_avg_sq<L>(s, v, second_increment<L>(s, g))));
        L::store(run.master + i, decode<L, width, 2>(codes, old_p));
    }
}

// Adam with an L2 penalty: the gradient contains the old master, so the master is restored (and its escapes patched)
// before the moments.
template <typename L, int width>
SUPEROFFLOAD_INLINE void undo_master_lanes(const Run& run, std::size_t begin, std::size_t end) {
    const Scalars s = run.frozen;
    for (std::size_t i = begin; i < end; i += L::width()) {
        const auto q = direction<L>(s, L::load(run.exp_avg + i), L::load(run.exp_avg_sq + i));
        const auto estimate = estimate_master<L, true>(s, L::load(run.master + i), q);
        L::store(run.master + i, decode<L, width, 2>(load_codes<L, width>(run.journal.codes, i), estimate));
    }
}

template <typename L, ElementType gradient, int width>
SUPEROFFLOAD_INLINE void undo_moment_lanes(const Run& run, std::size_t begin, std::size_t end) {
    const Scalars s = run.frozen;
    for (std::size_t i = begin; i < end; i += L::width()) {
        const auto p = L::load(run.master + i);
        const auto g = effective_gradient<L, true>(s, load_element<L, gradient>(run.gradient, i), p);
        const auto codes = load_codes<L, width>(run.journal.codes, i);
        const auto m = estimate_exp_avg<L>(s, L::load(run.exp_avg + i), first_increment<L>(s, g));
        const auto v = estimate_exp_avg_sq<L>(s, L::load(run.exp_avg_sq + i), second_increment<L>(s, g));
        L::store(run.exp_avg + i, decode<L, width, 0>(codes, m));
        L::store(run.exp_avg_sq + i, decode<L, width, 1>(codes, v));
    }
}

// Where whole vectors end; the rest of a range is done by the scalar lanes.
template <typename L>
SUPEROFFLOAD_INLINE std::size_t vector_end(std::size_t begin, std::size_t end) {
    return begin + (end - begin) / L::width() * L::width();
}

SUPEROFFLOAD_INLINE void patch(float* component, const std::uint32_t* old, const std::uint16_t* index,
                               std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) std::memcpy(component + index[i], old + i, sizeof(float));
}

// Escapes as undo needs them: three runs of old words, then three runs of indices (see docs/kernel.md).
struct EscapeView {
    const std::uint32_t* old[3];
    const std::uint16_t* index[3];
    std::uint32_t count[3];
};

inline EscapeView view_of(const JournalBlock& block, const JournalArena& arena) {
    EscapeView view{};
    const std::uint32_t* words = arena.words + block.offset;
    for (int i = 0; i < 3; ++i) {
        view.count[i] = block.escapes[i];
        view.old[i] = words;
        words += view.count[i];
    }
    const auto* index = reinterpret_cast<const std::uint16_t*>(words);
    for (int i = 0; i < 3; ++i) {
        view.index[i] = index;
        index += view.count[i];
    }
    return view;
}

inline EscapeView view_of(const BlockEscapes& escapes) {
    EscapeView view{};
    for (int i = 0; i < 3; ++i) {
        view.count[i] = escapes.component[i].count;
        view.old[i] = escapes.component[i].old;
        view.index[i] = escapes.component[i].index;
    }
    return view;
}

template <typename L, ElementType gradient, bool l2, int width>
inline void undo_block(const Run& run, std::size_t begin, std::size_t end, const EscapeView& escapes) {
    const std::size_t middle = vector_end<L>(begin, end);
    if constexpr (l2) {
        undo_master_lanes<L, width>(run, begin, middle);
        undo_master_lanes<ScalarLanes, width>(run, middle, end);
        patch(run.master + begin, escapes.old[2], escapes.index[2], escapes.count[2]);
        undo_moment_lanes<L, gradient, width>(run, begin, middle);
        undo_moment_lanes<ScalarLanes, gradient, width>(run, middle, end);
    } else {
        undo_lanes<L, gradient, width>(run, begin, middle);
        undo_lanes<ScalarLanes, gradient, width>(run, middle, end);
        patch(run.master + begin, escapes.old[2], escapes.index[2], escapes.count[2]);
    }
    patch(run.exp_avg + begin, escapes.old[0], escapes.index[0], escapes.count[0]);
    patch(run.exp_avg_sq + begin, escapes.old[1], escapes.index[1], escapes.count[1]);
}

// Moves a block's escapes into the arena. False: no room, and nothing was written.
inline bool commit_escapes(const BlockEscapes& escapes, JournalArena& arena, JournalBlock& block) {
    const std::uint32_t total = escapes.total();
    const std::uint64_t words = total + (total + 1) / 2;
    std::uint64_t offset = 0;
    if (total != 0) {
        offset = __atomic_fetch_add(&arena.used, words, __ATOMIC_RELAXED);
        if (offset + words > arena.capacity) {
            __atomic_fetch_sub(&arena.used, words, __ATOMIC_RELAXED);
            return false;
        }
    }
    std::uint32_t* old = arena.words + offset;
    auto* index = reinterpret_cast<std::uint16_t*>(old + total);
    for (int i = 0; i < 3; ++i) {
        const EscapeList& list = escapes.component[i];
        std::memcpy(old, list.old, list.count * sizeof(std::uint32_t));
        std::memcpy(index, list.index, list.count * sizeof(std::uint16_t));
        old += list.count;
        index += list.count;
        block.escapes[i] = static_cast<std::uint16_t>(list.count);
    }
    block.offset = static_cast<std::uint32_t>(offset);
    return true;
}

template <typename L, ElementType gradient, ElementType shadow, bool l2, int width>
bool journal_range(const Run& run, Range range) {
    BlockEscapes escapes;
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        const std::size_t end = begin + kBlock < range.end ? begin + kBlock : range.end;
        const std::size_t middle = vector_end<L>(begin, end);
        escapes.clear();
        journal_lanes<L, gradient, shadow, l2, width>(run, begin, begin, middle, escapes);
        journal_lanes<ScalarLanes, gradient, shadow, l2, width>(run, begin, middle, end, escapes);
        JournalBlock& block = run.journal.blocks[begin / kBlock];
        if (!commit_escapes(escapes, *run.journal.arena, block)) {
            undo_block<L, gradient, l2, width>(run, begin, end, view_of(escapes));
            return false;
        }
        // Where one- and two-byte codes have the same bits, a wide escape is a narrow one too.
        block.narrow_escapes = static_cast<std::uint16_t>(width == 1 ? escapes.total()
                                                                     : escapes.narrow + escapes.component[2].count);
    }
    return true;
}

template <typename L, ElementType gradient, bool l2, int width>
void undo_range(const Run& run, Range range) {
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        const std::size_t end = begin + kBlock < range.end ? begin + kBlock : range.end;
        JournalBlock& block = run.journal.blocks[begin / kBlock];
        if (block.offset == JournalBlock::kNotApplied) continue;
        undo_block<L, gradient, l2, width>(run, begin, end, view_of(block, *run.journal.arena));
        block.offset = JournalBlock::kNotApplied;
    }
}

template <typename L, ElementType gradient, ElementType shadow, bool l2>
inline void step_range(const Run& run, Range range) {
    const std::size_t middle = vector_end<L>(range.begin, range.end);
    step_lanes<L, gradient, shadow, l2>(run, range.begin, middle);
    step_lanes<ScalarLanes, gradient, shadow, l2>(run, middle, range.end);
}

// Calls f with the run's types as compile-time constants.
template <typename F>
inline auto with_gradient(const Run& run, F f) {
    using std::integral_constant;
    switch (run.gradient_type) {
        case ElementType::bf16:
            return f(integral_constant<ElementType, ElementType::bf16>{});
        case ElementType::f16:
            return f(integral_constant<ElementType, ElementType::f16>{});
        default:
            return f(integral_constant<ElementType, ElementType::f32>{});
    }
}

template <typename F>
inline auto with_types(const Run& run, F f) {
    return with_gradient(run, [&](auto gradient) {
        using std::integral_constant;
        switch (run.shadow_type) {
            case ElementType::bf16:
                return f(gradient, integral_constant<ElementType, ElementType::bf16>{});
            case ElementType::f16:
                return f(gradient, integral_constant<ElementType, ElementType::f16>{});
            default:
                return f(gradient, integral_constant<ElementType, ElementType::f32>{});
        }
    });
}

template <typename F>
inline auto with_flag(bool flag, F f) {
    return flag ? f(std::true_type{}) : f(std::false_type{});
}

template <typename L>
void step_all(const Run& run, Range range) {
    with_types(run, [&](auto gradient, auto shadow) {
        with_flag(run.frozen.l2, [&](auto l2) { step_range<L, gradient.value, shadow.value, l2.value>(run, range); });
    });
}

template <typename L>
void publish_all(const Run& run, Range range) {
    with_types(run, [&](auto gradient, auto shadow) {
        with_flag(run.frozen.l2, [&](auto l2) {
            const std::size_t middle = vector_end<L>(range.begin, range.end);
            publish_lanes<L, gradient.value, shadow.value, l2.value>(run, range.begin, middle);
            publish_lanes<ScalarLanes, gradient.value, shadow.value, l2.value>(run, middle, range.end);
        });
    });
}

template <typename L>
bool step_journaled_all(const Run& run, Range range) {
    return with_types(run, [&](auto gradient, auto shadow) {
        return with_flag(run.frozen.l2, [&](auto l2) {
            return run.journal.width == 1
                       ? journal_range<L, gradient.value, shadow.value, l2.value, 1>(run, range)
                       : journal_range<L, gradient.value, shadow.value, l2.value, 2>(run, range);
        });
    });
}

template <typename L>
void undo_all(const Run& run, Range range) {
    with_gradient(run, [&](auto gradient) {
        with_flag(run.frozen.l2, [&](auto l2) {
            if (run.journal.width == 1) {
                undo_range<L, gradient.value, l2.value, 1>(run, range);
            } else {
                undo_range<L, gradient.value, l2.value, 2>(run, range);
            }
        });
    });
}

// Block by block, so that the restored words are still in the first-level cache when they are stepped.
template <typename L>
void replay_all(const Run& run, Range range, const Scalars& scalars) {
    Run again = run;
    again.frozen = scalars;
    for (std::size_t begin = range.begin; begin < range.end; begin += kBlock) {
        const Range block{begin, begin + kBlock < range.end ? begin + kBlock : range.end};
        undo_all<L>(run, block);
        step_all<L>(again, block);
    }
}

template <typename L, ElementType type>
inline double sum_block(const void* gradient, std::size_t begin, std::size_t end) {
    typename L::Sums sums{};
    const std::size_t middle = begin + (end - begin) / 16 * 16;
    for (std::size_t i = begin; i < middle; i += 16) {
        if constexpr (type == ElementType::f32) L::sum16_f32(sums, static_cast<const float*>(gradient) + i);
        if constexpr (type == ElementType::bf16) L::sum16_bf16(sums, static_cast<const std::uint16_t*>(gradient) + i);
        if constexpr (type == ElementType::f16) L::sum16_f16(sums, static_cast<const std::uint16_t*>(gradient) + i);
    }
    double s[16];
    L::store_sums(sums, s);
    for (std::size_t i = middle; i < end; ++i) {
        const double x = load_element<ScalarLanes, type>(gradient, i);
        s[i - middle] += x * x;
    }
    for (int half = 8; half >= 1; half /= 2) {
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    }
    // A sum of squares of finite fp32 values cannot overflow fp64, so this is the test for a non-finite element.
    return s[0] - s[0] == 0 ? s[0] : __builtin_inf();
}

template <typename L>
void pack_all(const void* gradient, void* packed, ElementType type, std::size_t numel, double* block_sums) {
    const std::size_t size = element_size(type);
    for (std::size_t begin = 0; begin < numel; begin += kBlock) {
        const std::size_t end = begin + kBlock < numel ? begin + kBlock : numel;
        double& sum = block_sums[begin / kBlock];
        switch (type) {
            case ElementType::bf16:
                sum = sum_block<L, ElementType::bf16>(gradient, begin, end);
                break;
            case ElementType::f16:
                sum = sum_block<L, ElementType::f16>(gradient, begin, end);
                break;
            default:
                sum = sum_block<L, ElementType::f32>(gradient, begin, end);
        }
        if (packed != nullptr) {
            std::memcpy(static_cast<char*>(packed) + begin * size, static_cast<const char*>(gradient) + begin * size,
                        (end - begin) * size);
        }
    }
}

template <typename L>
constexpr Kernels kernels_of(const char* name) {
    return {name,          step_all<L>,    step_journaled_all<L>, undo_all<L>,
            replay_all<L>, publish_all<L>, pack_all<L>};
}

}  // namespace
}  // namespace superoffload::adam
