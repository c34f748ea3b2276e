// Writes and reads the undo journal: small codes for "old word minus estimate", and lists of the words whose code does
// not fit. Part of algorithm.inl; docs/kernel.md has the format and why undo is exact.
#pragma once

#include <cstring>

#include "arithmetic.inl"
#include "escapes.h"
#include "lanes_scalar.h"

namespace superoffload::adam {
namespace {

// Divides a code's bits over exp_avg, exp_avg_sq and master.
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
SUPEROFFLOAD_INLINE void store_pair_codes(std::uint8_t* codes, std::size_t i, typename L::U x) {
    if constexpr (width == 1) L::store_pair8(codes + i, x);
    if constexpr (width == 2) L::store_pair16(codes + 2 * i, x);
}

template <typename L, int width>
SUPEROFFLOAD_INLINE typename L::U load_codes(const std::uint8_t* codes, std::size_t i) {
    if constexpr (width == 1) return L::load_codes8(codes + i);
    if constexpr (width == 2) return L::load_codes16(codes + 2 * i);
}

// Converts a stored value to the integer that codes count in: units in its last place.
template <typename L, ElementType type>
SUPEROFFLOAD_INLINE typename L::U word_of(typename L::F stored) {
    if constexpr (type == ElementType::bf16) return L::template shr<16>(L::bits(stored));
    return L::bits(stored);
}

template <typename L, ElementType type>
SUPEROFFLOAD_INLINE typename L::F value_of(typename L::U word) {
    if constexpr (type == ElementType::bf16) return L::from_bits(L::template shl<16>(word));
    return L::from_bits(word);
}

// Converts an estimate to a word; to bf16 by rounding to nearest even. In bf16, two-byte codes reach from a NaN to an
// infinity, so a NaN's sign, which processors choose differently, would decide whether a word has a code.
template <typename L, ElementType type>
SUPEROFFLOAD_INLINE typename L::U estimated_word(typename L::F estimate) {
    if constexpr (type != ElementType::bf16) return L::bits(estimate);
    const auto u = L::bits(L::canonical(estimate));
    const auto odd = L::and_u(L::template shr<16>(u), L::set_u(1));
    return L::template shr<16>(L::add_u(L::add_u(u, L::set_u(0x7fffu)), odd));
}

// Computes old word minus estimate, shifted so that codes start at 0; modular, so +0 and -0 differ.
template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::U biased_difference(typename L::U old, typename L::U estimate) {
    return L::add_u(L::sub_u(old, estimate), L::set_u(bias<width, component>()));
}

// Returns nonzero in lanes whose difference has no code.
template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::U excess(typename L::U difference) {
    return L::and_u(difference, L::set_u(~(limit<width, component>() - 1)));
}

template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::U only_code(typename L::U difference) {
    return L::and_u(difference, L::set_u(limit<width, component>() - 1));
}

template <typename L, int width>
SUPEROFFLOAD_INLINE typename L::U join(typename L::U m, typename L::U v, typename L::U p) {
    return L::or_u(m, L::or_u(L::template shl<shift<width, 1>()>(v), L::template shl<shift<width, 2>()>(p)));
}

// Encodes one vector, from the words before the step and the words of their estimates. Words that do not fit their
// code, and all words of a lane whose new master is NaN, go to the block's escape lists: the bits of a NaN estimate may
// differ between step and undo. (An invalid operation can make an estimate NaN even if no old or new value is NaN. That
// is the processor's default NaN, and only an old word that is NaN itself is within reach of its code.)
template <typename L, int width>
SUPEROFFLOAD_INLINE typename L::U encode(typename L::U m, typename L::U est_m, typename L::U v, typename L::U est_v,
                                         typename L::U p, typename L::U est_p, typename L::F next_p,
                                         BlockEscapes& escapes, std::size_t index) {
    const auto diff_m = biased_difference<L, width, 0>(m, est_m);
    const auto diff_v = biased_difference<L, width, 1>(v, est_v);
    const auto diff_p = biased_difference<L, width, 2>(p, est_p);
    const auto nan = L::is_nan(next_p);
    if constexpr (width == 2) {
        const auto narrow_m = L::nonzero(excess<L, 1, 0>(biased_difference<L, 1, 0>(m, est_m)));
        const auto narrow_v = L::nonzero(excess<L, 1, 1>(biased_difference<L, 1, 1>(v, est_v)));
        escapes.narrow += L::count(L::either(narrow_m, nan)) + L::count(L::either(narrow_v, nan));
    }
    const auto over_m = excess<L, width, 0>(diff_m);
    const auto over_v = excess<L, width, 1>(diff_v);
    const auto over_p = excess<L, width, 2>(diff_p);
    if (L::any_bit_or_nan(L::or_u(over_m, L::or_u(over_v, over_p)), next_p)) {
        const auto at = static_cast<std::uint32_t>(index);
        L::append(escapes.component[0], L::either(L::nonzero(over_m), nan), m, at);
        L::append(escapes.component[1], L::either(L::nonzero(over_v), nan), v, at);
        L::append(escapes.component[2], L::either(L::nonzero(over_p), nan), p, at);
        return join<L, width>(only_code<L, width, 0>(diff_m), only_code<L, width, 1>(diff_v),
                              only_code<L, width, 2>(diff_p));
    }
    return join<L, width>(diff_m, diff_v, diff_p);
}

// Holds the differences of two vectors as 16-bit words, for lane types that have them (kPairs): half the instructions.
// Signed saturation keeps differences without a code out of range.
template <typename L>
struct PairDifferences {
    typename L::U component[3];  // exp_avg, exp_avg_sq, master; not biased
};

template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::U biased_pair(const PairDifferences<L>& difference) {
    return L::add_u16(difference.component[component], L::set_u16(bias<width, component>()));
}

template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::U pair_excess(typename L::U words) {
    return L::and_u(words, L::set_u16(static_cast<std::uint16_t>(~(limit<width, component>() - 1))));
}

// Returns nonzero if any of the three has no code; the two with the same range share a test.
template <typename L, int width>
SUPEROFFLOAD_INLINE typename L::U any_pair_excess(typename L::U m, typename L::U v, typename L::U p) {
    if constexpr (width == 1) return L::or_u(pair_excess<L, 1, 0>(m), pair_excess<L, 1, 1>(L::or_u(v, p)));
    if constexpr (width == 2) return L::or_u(pair_excess<L, 2, 0>(L::or_u(m, v)), pair_excess<L, 2, 2>(p));
}

template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::U pair_only_code(typename L::U words) {
    return L::and_u(words, L::set_u16(static_cast<std::uint16_t>(limit<width, component>() - 1)));
}

// Counts the pair's words that have no one-byte code.
template <typename L>
SUPEROFFLOAD_INLINE std::uint32_t count_narrow_escapes(const PairDifferences<L>& difference) {
    const auto m = L::nonzero_u16(pair_excess<L, 1, 0>(biased_pair<L, 1, 0>(difference)));
    const auto v = L::nonzero_u16(pair_excess<L, 1, 1>(biased_pair<L, 1, 1>(difference)));
    return static_cast<std::uint32_t>(__builtin_popcount(m) + __builtin_popcount(v));
}

// Appends the old words, still in memory, whose differences are out of range. `load(i)` returns element i.
template <typename L, ElementType type, typename Load>
SUPEROFFLOAD_INLINE void append_pair(EscapeList& list, typename L::U excess, Load load, std::size_t i,
                                     std::size_t block) {
    for (std::uint32_t mask = L::nonzero_u16(L::pair_in_order(excess)); mask != 0; mask &= mask - 1) {
        const std::size_t at = i + static_cast<std::size_t>(__builtin_ctz(mask));
        list.append(static_cast<std::uint32_t>(at - block), word_of<ScalarLanes, type>(load(at)));
    }
}

template <typename L, typename T, int width>
SUPEROFFLOAD_INLINE typename L::U encode_pair(const PairDifferences<L>& difference, const Run& run, std::size_t i,
                                              std::size_t block, BlockEscapes& escapes) {
    auto m = biased_pair<L, width, 0>(difference);
    auto v = biased_pair<L, width, 1>(difference);
    auto p = biased_pair<L, width, 2>(difference);
    if constexpr (width == 2) escapes.narrow += count_narrow_escapes<L>(difference);
    if (__builtin_expect(L::any_bit(any_pair_excess<L, width>(m, v, p)), 0)) {
        const auto old_m = [&run](std::size_t at) { return load_element<ScalarLanes, T::state>(run.exp_avg, at); };
        const auto old_v = [&run](std::size_t at) { return load_element<ScalarLanes, T::state>(run.exp_avg_sq, at); };
        const auto old_p = [&run](std::size_t at) { return load_master<ScalarLanes, T::split>(run, at); };
        append_pair<L, T::state>(escapes.component[0], pair_excess<L, width, 0>(m), old_m, i, block);
        append_pair<L, T::state>(escapes.component[1], pair_excess<L, width, 1>(v), old_v, i, block);
        append_pair<L, ElementType::f32>(escapes.component[2], pair_excess<L, width, 2>(p), old_p, i, block);
        m = pair_only_code<L, width, 0>(m);
        v = pair_only_code<L, width, 1>(v);
        p = pair_only_code<L, width, 2>(p);
    }
    return L::pair_in_order(join<L, width>(m, v, p));
}

// Restores old words from their codes and the words of their estimates.
template <typename L, int width, int component>
SUPEROFFLOAD_INLINE typename L::U old_word(typename L::U codes, typename L::U estimate) {
    const auto code = only_code<L, width, component>(L::template shr<shift<width, component>()>(codes));
    return L::add_u(estimate, L::sub_u(code, L::set_u(bias<width, component>())));
}

template <typename L, int width, int component, ElementType type>
SUPEROFFLOAD_INLINE typename L::F decode(typename L::U codes, typename L::F estimate) {
    return value_of<L, type>(old_word<L, width, component>(codes, estimated_word<L, type>(estimate)));
}

// Walks a block's escapes in the order in which undo meets them: per component the old words and their indices in the
// block, ascending.
class EscapeCursor {
   public:
    // Reads a block in the arena: three runs of old words, then three runs of indices.
    EscapeCursor(const JournalBlock& block, const JournalArena& arena) : scales_(block.scales) {
        const std::uint32_t* old = arena.words + block.offset;
        const std::uint32_t total = std::uint32_t{block.escapes[0]} + block.escapes[1] + block.escapes[2];
        const auto* index = reinterpret_cast<const std::uint16_t*>(old + total);
        for (int i = 0; i < 3; ++i) {
            const std::uint16_t count = block.escapes[i];
            component_[i] = {old, index, index + count};
            old += count;
            index += count;
        }
        advance();
    }

    // Returns the old scale of exp_avg (0) or exp_avg_sq (1), where the moments have any, of the element at `index`.
    std::uint8_t scale(int component, std::size_t index) const { return scales_[component][index / kMomentBlock]; }

    // Tells whether a word before `end` has escaped and is not restored yet.
    bool reaches(std::size_t end) const { return next_ < end; }

    // Restores the escaped words of the vector at `begin`.
    template <typename L, int component, ElementType type>
    SUPEROFFLOAD_INLINE typename L::F patch(typename L::F x, std::size_t begin) {
        alignas(64) float values[kLongestVector];
        L::store(values, x);
        List& list = component_[component];
        for (; list.index != list.end && *list.index < begin + L::width(); ++list.index, ++list.old) {
            ScalarLanes::store(values + (*list.index - begin), value_of<ScalarLanes, type>(*list.old));
        }
        return L::load(values);
    }

    // Finds the next escape after the vector's three components.
    void advance() {
        next_ = kBlock;
        for (const List& list : component_) {
            if (list.index != list.end && *list.index < next_) next_ = *list.index;
        }
    }

   private:
    struct List {
        const std::uint32_t* old;
        const std::uint16_t* index;
        const std::uint16_t* end;
    };
    List component_[3];
    std::uint32_t next_;
    const std::uint8_t (*scales_)[kBlock / kMomentBlock];
};

// Collects escapes of blocks that have no place in the arena yet. The threads that step a bucket share its arena. If
// each took room block by block, they would often wait for one cache line, and for the lines that their blocks share.
class WaitingEscapes {
   public:
    // Tells whether all escapes of one more block fit.
    bool has_room() const { return used_ <= kWords - kBlockWords; }

    void add(const BlockEscapes& escapes, JournalBlock& block) {
        const std::uint32_t total = escapes.total();
        const std::uint32_t words = total + (total + 1) / 2;
        if (words != 0) words_[used_ + words - 1] = 0;  // an odd number of indices leaves half a word
        block.offset = used_;
        std::uint32_t* old = words_ + used_;
        auto* index = reinterpret_cast<std::uint16_t*>(old + total);
        for (int i = 0; i < 3; ++i) {
            const EscapeList& list = escapes.component[i];
            std::memcpy(old, list.old, list.count * sizeof(std::uint32_t));
            std::memcpy(index, list.index, list.count * sizeof(std::uint16_t));
            old += list.count;
            index += list.count;
            block.escapes[i] = static_cast<std::uint16_t>(list.count);
        }
        std::memcpy(block.scales, escapes.scales, sizeof block.scales);
        used_ += words;
    }

    // Moves all of them into the arena; `first` up to `last` are their blocks. False: no room, and nothing was changed.
    bool commit(JournalArena& arena, JournalBlock* first, const JournalBlock* last) {
        if (used_ == 0) return true;
        const std::uint64_t offset = __atomic_fetch_add(&arena.used, used_, __ATOMIC_RELAXED);
        if (offset + used_ > arena.capacity) {
            __atomic_fetch_sub(&arena.used, used_, __ATOMIC_RELAXED);
            return false;
        }
        std::memcpy(arena.words + offset, words_, used_ * sizeof(std::uint32_t));
        for (; first != last; ++first) first->offset += static_cast<std::uint32_t>(offset);
        used_ = 0;
        return true;
    }

    // Returns them as an arena, to undo blocks for which there was no room.
    JournalArena as_arena() { return {words_, kWords, used_}; }

   private:
    static constexpr std::uint32_t kBlockWords = 3 * kBlock * 3 / 2;  // a block of which every word escapes
    static constexpr std::uint32_t kWords = 2 * kBlockWords;
    std::uint32_t used_ = 0;
    std::uint32_t words_[kWords];
};

}  // namespace
}  // namespace superoffload::adam
