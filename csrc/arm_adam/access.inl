// Loads, stores and prefetches vectors of a run's arrays, in each of their types. Part of algorithm.inl.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adam.h"

#define SUPEROFFLOAD_INLINE inline __attribute__((always_inline))
#define SUPEROFFLOAD_NOINLINE __attribute__((noinline))

namespace superoffload::adam {
namespace {

constexpr std::size_t kLongestVector = 2048 / 32;  // SVE's

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

// Loads masters. Where a split master has no shadow, publish() has kept the old upper halves.
template <typename L, bool split>
SUPEROFFLOAD_INLINE typename L::F load_master(const Run& run, std::size_t i) {
    if constexpr (!split) return L::load(static_cast<const float*>(run.master) + i);
    const void* const halves = run.shadow != nullptr ? run.shadow : run.kept_halves;
    const auto upper = L::bits(L::load_bf16(static_cast<const std::uint16_t*>(halves) + i));
    return L::from_bits(L::add_u(upper, L::load_i16(static_cast<const std::int16_t*>(run.master) + i)));
}

// Stores the upper halves of canonical split masters, which are the published copy.
template <typename L>
SUPEROFFLOAD_INLINE void store_upper_halves(void* shadow, std::size_t i, typename L::F x) {
    const auto rounded = L::add_u(L::bits(x), L::set_u(0x8000u));
    L::store_low16(static_cast<std::uint16_t*>(shadow) + i, L::template shr<16>(rounded));
}

// Stores canonical masters. The remainder is the lower half of the word, as a signed number.
template <typename L, bool split>
SUPEROFFLOAD_INLINE void store_master(const Run& run, std::size_t i, typename L::F x) {
    if constexpr (!split) {
        L::store(static_cast<float*>(run.master) + i, x);
    } else {
        L::store_low16(static_cast<std::uint16_t*>(run.master) + i, L::bits(x));
        if (run.shadow != nullptr) store_upper_halves<L>(run.shadow, i, x);
    }
}

// Stores the published copy. `past_cache`: it is not read soon and fills whole lines, so memory need not be read first.
template <typename L, ElementType type>
SUPEROFFLOAD_INLINE void store_shadow(void* base, std::size_t i, typename L::F x, bool past_cache) {
    if constexpr (type == ElementType::f32) L::store_shadow(static_cast<float*>(base) + i, x, past_cache);
    if constexpr (type == ElementType::bf16) L::store_bf16(static_cast<std::uint16_t*>(base) + i, x, past_cache);
    if constexpr (type == ElementType::f16) L::store_f16(static_cast<std::uint16_t*>(base) + i, x, past_cache);
}

// Stores the published copy of two vectors.
template <typename L, ElementType type>
SUPEROFFLOAD_INLINE void store_shadow_pair(void* base, std::size_t i, typename L::F x, typename L::F y,
                                           bool past_cache) {
    if constexpr (L::kPairsFillLines && type != ElementType::f32) {
        if (past_cache) {
            auto* to = static_cast<std::uint16_t*>(base) + i;
            if constexpr (type == ElementType::bf16) L::stream_pair_bf16(to, x, y);
            if constexpr (type == ElementType::f16) L::stream_pair_f16(to, x, y);
            return;
        }
    }
    store_shadow<L, type>(base, i, x, false);
    store_shadow<L, type>(base, i + L::width(), y, false);
}

// Prefetches state and gradient. The processor's own prefetchers stop at page borders, and its window is too short to
// hide memory behind a square root and a division. The address may lie past the end; nothing is read.
template <typename L, typename T, std::size_t elements = L::kPrefetchAhead>
SUPEROFFLOAD_INLINE void prefetch(const Run& run, std::size_t i) {
    if constexpr (elements != 0) {
        const auto ahead = [i](const void* array, std::size_t size) {
            const auto address = reinterpret_cast<std::uintptr_t>(array) + (i + elements) * size;
            __builtin_prefetch(reinterpret_cast<const void*>(address));
        };
        ahead(run.master, T::split ? 2 : 4);
        if constexpr (T::split) ahead(run.shadow, 2);
        ahead(run.exp_avg, element_size(T::state));
        ahead(run.exp_avg_sq, element_size(T::state));
        ahead(run.gradient, element_size(T::gradient));
    }
}

// Only aligned addresses can bypass the caches. Ranges start at whole blocks, so the array's start decides.
constexpr std::size_t kLine = 64;
SUPEROFFLOAD_INLINE bool is_aligned(const void* array) { return reinterpret_cast<std::uintptr_t>(array) % kLine == 0; }
SUPEROFFLOAD_INLINE bool stores_past_cache(const Run& run) { return run.past_cache && is_aligned(run.shadow); }

// Stores masters and their published copy, which a split master is made of.
template <typename L, typename T>
SUPEROFFLOAD_INLINE void store_parameters(const Run& run, std::size_t i, typename L::F p, bool past_cache) {
    store_master<L, T::split>(run, i, p);
    if constexpr (!T::split) {
        if (run.shadow != nullptr) store_shadow<L, T::shadow>(run.shadow, i, p, past_cache);
    }
}

// Stores the published copy alone. Of split masters, whose upper halves it replaces, the old ones are kept.
template <typename L, typename T>
SUPEROFFLOAD_INLINE void publish_vector(const Run& run, std::size_t i, typename L::F p, bool past_cache) {
    if constexpr (T::split) {
        const auto old = L::bits(L::load_bf16(static_cast<const std::uint16_t*>(run.shadow) + i));
        L::store_low16(run.kept_halves + i, L::template shr<16>(old));
        store_upper_halves<L>(run.shadow, i, p);
    } else {
        store_shadow<L, T::shadow>(run.shadow, i, p, past_cache);
    }
}

}  // namespace
}  // namespace superoffload::adam
