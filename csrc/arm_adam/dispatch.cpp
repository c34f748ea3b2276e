// Chooses an instruction set at run time and enters its kernels with a known floating-point environment.
#include <atomic>
#include <cmath>
#include <cstring>

#include "adam.h"
#include "float_environment.h"
#include "kernels.h"
#include "x86_features.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace superoffload::adam {
namespace {

struct Candidate {
    const Kernels* kernels;
    bool (*supported)();
};

// Slowest first: the last one that the processor supports is the default.
const Candidate kCandidates[] = {
    {&kScalarKernels, [] { return true; }},
#ifdef SUPEROFFLOAD_BUILT_AVX2
    {&kAvx2Kernels, [] { return x86_features().avx2; }},
#endif
#ifdef SUPEROFFLOAD_BUILT_AVX512
    {&kAvx512Kernels, [] { return x86_features().avx512; }},
#endif
#ifdef SUPEROFFLOAD_BUILT_NEON
    {&kNeonKernels, [] { return true; }},
#endif
#ifdef SUPEROFFLOAD_BUILT_SVE
    {&kSveKernels, [] { return (getauxval(AT_HWCAP) & (1ul << 22)) != 0; }},  // HWCAP_SVE
#endif
};

const Kernels* best() {
    const Kernels* found = nullptr;
    for (const Candidate& candidate : kCandidates) {
        if (candidate.supported()) found = candidate.kernels;
    }
    return found;
}

std::atomic<const Kernels*>& selected() {
    static std::atomic<const Kernels*> kernels{best()};
    return kernels;
}

const Kernels& kernels() { return *selected().load(std::memory_order_relaxed); }

// Uses repeated squaring, so that the result does not depend on a system's pow().
double power(double base, std::uint64_t exponent) {
    double result = 1;
    for (; exponent != 0; exponent >>= 1) {
        if ((exponent & 1) != 0) result *= base;
        base *= base;
    }
    return result;
}

// Applies one round of Sebastiano Vigna's splitmix64.
std::uint64_t mix(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

}  // namespace

Scalars freeze(const Hyper& h, std::uint64_t noise_stream) {
    const FloatEnvironment environment;
    const double bias1 = 1 - power(h.beta1, h.step);
    const double bias2 = 1 - power(h.beta2, h.step);
    const double decay = h.l2 ? 1 : 1 - h.lr * h.weight_decay;
    Scalars s{};
    s.gradient_factor = static_cast<float>(h.gradient_factor);
    s.beta1 = static_cast<float>(h.beta1);
    s.beta1_rest = static_cast<float>(h.beta1 - static_cast<double>(s.beta1));
    s.one_minus_beta1 = static_cast<float>(1 - h.beta1);
    // Before the first step the moments were +0; an estimate of exactly +0 needs no code.
    s.inverse_beta1 = h.step == 1 ? 0.0f : static_cast<float>(1 / h.beta1);
    s.beta2 = static_cast<float>(h.beta2);
    s.one_minus_beta2 = static_cast<float>(1 - h.beta2);
    s.inverse_beta2 = h.step == 1 ? 0.0f : static_cast<float>(1 / h.beta2);
    s.eps = static_cast<float>(h.eps);
    s.step_size = static_cast<float>(h.lr / bias1);
    s.inverse_sqrt_bias2 = static_cast<float>(1 / std::sqrt(bias2));
    s.decay = static_cast<float>(decay);
    s.inverse_decay = static_cast<float>(1 / decay);
    s.weight_decay = static_cast<float>(h.weight_decay);
    s.l2 = h.l2;
    s.noise_key = static_cast<std::uint32_t>(mix(noise_stream ^ mix(h.step)));
    return environment.finish(s);
}

void step(const Run& run, Range range) {
    const FloatEnvironment environment;
    kernels().step(run, range);
}

bool step_journaled(const Run& run, Range range) {
    const FloatEnvironment environment;
    return kernels().step_journaled(run, range);
}

void undo(const Run& run, Range range) {
    const FloatEnvironment environment;
    kernels().undo(run, range);
}

void replay(const Run& run, Range range, const Scalars& scalars) {
    const FloatEnvironment environment;
    kernels().replay(run, range, scalars);
}

void publish(const Run& run, Range range) {
    const FloatEnvironment environment;
    kernels().publish(run, range);
}

void sum_of_squares(const void* gradient, ElementType type, std::size_t numel, double* block_sums) {
    pack(gradient, nullptr, type, numel, block_sums);
}

void pack(const void* gradient, void* packed, ElementType type, std::size_t numel, double* block_sums) {
    const FloatEnvironment environment;
    kernels().pack(gradient, packed, type, numel, block_sums);
}

double fold_sums(const double* block_sums, std::size_t count) {
    const FloatEnvironment environment;
    double s[8] = {};
    for (std::size_t i = 0; i < count; ++i) s[i % 8] += block_sums[i];
    for (int half = 4; half >= 1; half /= 2) {
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    }
    return environment.finish(s[0]);
}

std::size_t available_isas(const char** names, std::size_t capacity) {
    std::size_t count = 0;
    for (const Candidate& candidate : kCandidates) {
        if (!candidate.supported()) continue;
        if (count < capacity) names[count] = candidate.kernels->name;
        ++count;
    }
    return count;
}

const char* current_isa() { return kernels().name; }

bool set_isa(const char* name) {
    for (const Candidate& candidate : kCandidates) {
        if (candidate.supported() && std::strcmp(candidate.kernels->name, name) == 0) {
            selected().store(candidate.kernels, std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

}  // namespace superoffload::adam
