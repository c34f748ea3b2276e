// Says which vectors an x86 processor has and its system saves. By hand, since the compiler's __builtin_cpu_supports
// finds nothing where the runtime library is not GCC's or LLVM's own (Zig's, which builds the wheels).
#pragma once

#ifdef __x86_64__
#include <cpuid.h>

namespace superoffload::adam {

struct X86Features {
    bool avx2 = false;    // with FMA and F16C
    bool avx512 = false;  // F, DQ, BW and VL, with all of the above
};

// Intel's manual, volume 1, 14.3 and 15.2: a set may be used if CPUID has it and XCR0 says that its registers are
// saved.
inline X86Features x86_features() {
    const auto has = [](unsigned word, unsigned bits) { return (word & bits) == bits; };
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return {};
    constexpr unsigned kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
    if (!has(ecx, kFma | kOsxsave | kAvx | kF16c)) return {};
    unsigned saved = 0, saved_high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if (!has(saved, 0x6) || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return {};  // XMM and YMM
    constexpr unsigned kAvx2 = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
    const bool avx2 = has(ebx, kAvx2);
    return {avx2, avx2 && has(saved, 0xe6) && has(ebx, kF | kDq | kBw | kVl)};  // opmask and ZMM too
}

}  // namespace superoffload::adam
#endif
