// Compiles the loops of memory_limit for each vector width of the architecture. Wider ones carry a target attribute,
// since this file is compiled for the oldest processor; they are called only where the processor has them.
#include "loops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace superoffload::memory_limit {
namespace {

#if defined(__x86_64__)

#define WIDTH_NAME sse2
#define WIDTH_BYTES 16
#define WIDTH_TARGET
#define STREAM_STORE(address, vector) _mm_stream_si128(reinterpret_cast<__m128i*>(address), (__m128i)(vector))
#include "loops.inl"

#define WIDTH_NAME avx2
#define WIDTH_BYTES 32
#define WIDTH_TARGET __attribute__((target("avx2")))
#define STREAM_STORE(address, vector) _mm256_stream_si256(reinterpret_cast<__m256i*>(address), (__m256i)(vector))
#include "loops.inl"

#define WIDTH_NAME avx512
#define WIDTH_BYTES 64
#define WIDTH_TARGET __attribute__((target("avx512f")))
#define STREAM_STORE(address, vector) _mm512_stream_si512(reinterpret_cast<__m512i*>(address), (__m512i)(vector))
#include "loops.inl"

#elif defined(__aarch64__)

// 32 bytes, because the streaming store of AArch64 takes a pair of registers.
#define WIDTH_NAME neon
#define WIDTH_BYTES 32
#define WIDTH_TARGET
#define STREAM_STORE(address, vector) store_pair(address, vector)
template <typename Pair>
inline void store_pair(std::uint8_t* address, const Pair& pair) {
    using Half = std::uint32_t __attribute__((vector_size(16)));
    const Half low = {pair[0], pair[1], pair[2], pair[3]};
    const Half high = {pair[4], pair[5], pair[6], pair[7]};
    __asm__ volatile("stnp %q0, %q1, [%2]" : : "w"(low), "w"(high), "r"(address) : "memory");
}
#include "loops.inl"

#else

#define WIDTH_NAME plain
#define WIDTH_BYTES 16
#define WIDTH_TARGET
#define STREAM_STORE(address, vector) (*reinterpret_cast<Vector*>(address) = (vector))
#include "loops.inl"

#endif

}  // namespace

std::size_t supported_loops(NamedLoops* found) {
    std::size_t count = 0;
#if defined(__x86_64__)
    found[count++] = {"sse2", &sse2::kLoops};
    if (__builtin_cpu_supports("avx2")) found[count++] = {"avx2", &avx2::kLoops};
    if (__builtin_cpu_supports("avx512f")) found[count++] = {"avx512", &avx512::kLoops};
#elif defined(__aarch64__)
    found[count++] = {"neon", &neon::kLoops};
#else
    found[count++] = {"plain", &plain::kLoops};
#endif
    return count;
}

void fence_streaming_stores() {
#if defined(__x86_64__)
    _mm_sfence();
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

}  // namespace superoffload::memory_limit
