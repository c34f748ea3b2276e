// Converts elements of tensors: words of 16 or 32 bits, and the fp32 values that they stand for. Rounding is that of
// the processor's kernels (csrc/arm_adam/lanes_scalar.h), in integers: nearest even, denormals kept, one pattern for
// NaN. A GPU's own conversions have another pattern.
#pragma once

namespace superoffload {
namespace cuda {

__device__ inline bool is_nan(float x) { return x != x; }

struct F32 {
    using Word = unsigned;
    __device__ static float value(Word word) { return __uint_as_float(word); }
    __device__ static Word word(float x) { return is_nan(x) ? 0x7fc00000u : __float_as_uint(x); }
};

struct Bf16 {
    using Word = unsigned short;
    __device__ static float value(Word word) { return __uint_as_float(static_cast<unsigned>(word) << 16); }
    __device__ static Word word(float x) {
        const unsigned u = __float_as_uint(x);
        return static_cast<Word>(is_nan(x) ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
};

struct F16 {
    using Word = unsigned short;
    __device__ static float value(Word word) {
        const unsigned half = word;
        const unsigned sign = (half & 0x8000u) << 16;
        const unsigned exponent = (half >> 10) & 0x1fu;
        const unsigned fraction = half & 0x3ffu;
        if (exponent == 0x1fu) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
        if (exponent != 0) return __uint_as_float(sign | ((exponent + 112u) << 23) | (fraction << 13));
        // denormal: fraction x 2^-24, exact
        const float magnitude = __fmul_rn(static_cast<float>(fraction), __uint_as_float(0x33800000u));
        return __uint_as_float(__float_as_uint(magnitude) | sign);
    }
    __device__ static Word word(float x) {
        const unsigned u = __float_as_uint(x);
        const unsigned sign = (u >> 16) & 0x8000u;
        const unsigned magnitude = u & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return 0x7e00u;
        unsigned half;
        if (magnitude >= 0x47800000u) {  // 65536 and more; 65520 to 65536 round up to infinity below
            half = 0x7c00u;
        } else if (magnitude >= 0x38800000u) {  // normal
            half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        } else {  // denormal: adding 0.5 leaves fraction x 2^24, rounded to nearest even, in the low bits
            half = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u;
        }
        return static_cast<Word>(sign | half);
    }
};

// Loads and stores `bytes` (4, 8 or 16) of consecutive words at once. They are held in words of 32 bits, and stored to
// global memory by an intrinsic: compilers split plain stores of several words, and arrays of smaller ones.
template <unsigned bytes>
struct Access;
template <>
struct Access<4> {
    __device__ static void load(unsigned* to, const void* from) { to[0] = *static_cast<const unsigned*>(from); }
    __device__ static void store(void* to, const unsigned* from) { __stcg(static_cast<unsigned*>(to), from[0]); }
};
template <>
struct Access<8> {
    __device__ static void load(unsigned* to, const void* from) {
        const uint2 all = *static_cast<const uint2*>(from);
        to[0] = all.x;
        to[1] = all.y;
    }
    __device__ static void store(void* to, const unsigned* from) {
        __stcg(static_cast<uint2*>(to), make_uint2(from[0], from[1]));
    }
};
template <>
struct Access<16> {
    __device__ static void load(unsigned* to, const void* from) {
        const uint4 all = *static_cast<const uint4*>(from);
        to[0] = all.x;
        to[1] = all.y;
        to[2] = all.z;
        to[3] = all.w;
    }
    __device__ static void store(void* to, const unsigned* from) {
        __stcg(static_cast<uint4*>(to), make_uint4(from[0], from[1], from[2], from[3]));
    }
    __device__ static void stage(void* to, const unsigned* from) {
        *static_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
    }
};

template <typename Word, unsigned count>
struct Packet {
    static constexpr unsigned kBits = 8 * sizeof(Word);
    static constexpr unsigned kPerUnit = 4 / sizeof(Word);
    unsigned units[count / kPerUnit];

    __device__ void load(const Word* from) { Access<count * sizeof(Word)>::load(units, from); }
    __device__ void store(Word* to) const { Access<count * sizeof(Word)>::store(to, units); }
    __device__ void stage(Word* to) const { Access<count * sizeof(Word)>::stage(to, units); }  // to shared memory
    __device__ Word get(unsigned i) const { return static_cast<Word>(units[i / kPerUnit] >> (i % kPerUnit * kBits)); }
    // Must be called in order from 0 on, once for each word: the first word of a unit clears the others.
    __device__ void set(unsigned i, Word word) {
        const unsigned shift = i % kPerUnit * kBits;
        units[i / kPerUnit] = shift == 0 ? word : units[i / kPerUnit] | static_cast<unsigned>(word) << shift;
    }
};

// Holds a single word, so that the same code handles remainders and unaligned elements.
template <typename Word>
struct Packet<Word, 1> {
    Word word;

    __device__ void load(const Word* from) { word = *from; }
    __device__ void store(Word* to) const { *to = word; }
    __device__ Word get(unsigned) const { return word; }
    __device__ void set(unsigned, Word value) { word = value; }
};

__device__ inline bool is_aligned(const void* address, unsigned bytes) {
    return reinterpret_cast<unsigned long long>(address) % bytes == 0;
}

// Counts the words per packet of 16 bytes.
template <typename Word>
constexpr unsigned kWidth = 16 / sizeof(Word);

}  // namespace cuda
}  // namespace superoffload
