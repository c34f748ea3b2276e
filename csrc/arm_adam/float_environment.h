// Sets the floating-point environment of every kernel: round to nearest, denormals kept. A thread inherits its
// creator's control register, and torch.set_flush_denormal changes it, so each entry sets the register and restores it.
// AArch64 processors can also make every NaN the canonical one, which saves the kernels six instructions.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace superoffload {

class FloatEnvironment {
   public:
#if defined(__x86_64__)
    FloatEnvironment() : saved_(_mm_getcsr()) {
        _mm_setcsr(0x1f80);
        fence();
    }
    ~FloatEnvironment() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
    FloatEnvironment() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" : : "r"(kDefaultNaN));
        fence();
    }
    ~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
    FloatEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
        fence();
    }
    ~FloatEnvironment() { std::fesetenv(&saved_); }
#endif
    // Hides a result from the compiler. Compilers move arithmetic across a change of the control register, since they
    // do not see that it matters. A function that calculates by itself, instead of calling a kernel through its table,
    // passes its result through here last, and reads its memory after the constructor.
    template <typename T>
    const T& finish(T& result) const {
        __asm__ volatile("" : "+m"(result) : : "memory");
        return result;
    }
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

   private:
    static void fence() { __asm__ volatile("" : : : "memory"); }

#if defined(__x86_64__)
    unsigned saved_;
#elif defined(__aarch64__)
    static constexpr std::uint64_t kDefaultNaN = std::uint64_t{1} << 25;  // FPCR.DN; everything else is 0
    std::uint64_t saved_ = 0;
#else
    std::fenv_t saved_;
#endif
};

}  // namespace superoffload
