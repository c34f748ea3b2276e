// Computes the step of one vector of elements, and its inverse as far as rounding allows. Part of algorithm.inl.
//
// A lane type L supplies vectors of L::width() elements: F (fp32), U (32-bit words), M (masks), and one function per
// IEEE operation. fma is written where the algorithm means a fused operation and nowhere else.
#pragma once

#include "access.inl"
#include "adam.h"

namespace superoffload::adam {
namespace {

// Computes the gradient that enters the moments. The branch is the same for all vectors of a run. All else that an L2
// penalty changes is in the scalars: decay and its inverse are 1.
template <typename L>
SUPEROFFLOAD_INLINE typename L::F effective_gradient(const Scalars& s, typename L::F raw, typename L::F master) {
    const auto g = L::mul(raw, L::set(s.gradient_factor));
    if (s.l2) return L::fma(L::set(s.weight_decay), master, g);
    return g;
}

// Computes what the gradient adds to exp_avg, as undo knows it: without the old exp_avg.
template <typename L>
SUPEROFFLOAD_INLINE typename L::F first_increment(const Scalars& s, typename L::F g) {
    return L::mul(L::set(s.one_minus_beta1), g);
}

// Squares first, since the square of a bf16 gradient is exact.
template <typename L>
SUPEROFFLOAD_INLINE typename L::F second_increment(const Scalars& s, typename L::F g) {
    return L::mul(L::set(s.one_minus_beta2), L::mul(g, g));
}

// Mixes all but the last step of noise().
template <typename L>
SUPEROFFLOAD_INLINE typename L::U noise_before_last_xor(const Scalars& s, typename L::U places) {
    auto x = L::xor_u(places, L::set_u(s.noise_key));
    x = L::mul_u(L::xor_u(x, L::template shr<16>(x)), L::set_u(0x7feb352du));
    return L::mul_u(L::xor_u(x, L::template shr<15>(x)), L::set_u(0x846ca68bu));
}

// Makes thirty-two random bits per element, the same for every instruction set, thread count, order and layout over
// ranks: a hash of step, seed and parameter (the key) and of the element's place in the whole parameter. The mixing
// function is Chris Wellons's "lowbias32" (nullprogram.com/blog/2018/07/31).
template <typename L>
SUPEROFFLOAD_INLINE typename L::U noise(const Scalars& s, typename L::U places) {
    const auto x = noise_before_last_xor<L>(s, places);
    return L::xor_u(x, L::template shr<16>(x));
}

// Rounds stochastically to bf16, still as fp32: the dropped part of the word is the chance to round away from zero.
template <typename L>
SUPEROFFLOAD_INLINE typename L::F round_randomly(typename L::F x, typename L::U noise16) {
    const auto sum = L::add_u(L::bits(L::canonical(x)), noise16);
    return L::from_bits(L::and_u(sum, L::set_u(0xffff0000u)));
}

// Computes the new moments as they are stored. The direction is computed from these, so that undo can compute it too.
// Rounding 0.9 to fp32 alone would be the largest error of exp_avg, so the part that the rounding drops counts too.
template <typename L, ElementType state>
SUPEROFFLOAD_INLINE void next_moments(const Scalars& s, typename L::F& exp_avg, typename L::F& exp_avg_sq,
                                      typename L::F g, typename L::F second, typename L::U places) {
    const auto rest = L::mul(L::set(s.beta1_rest), exp_avg);
    exp_avg = L::fma(L::set(s.beta1), exp_avg, L::fma(L::set(s.one_minus_beta1), g, rest));
    exp_avg_sq = L::fma(L::set(s.beta2), exp_avg_sq, second);
    if constexpr (state == ElementType::bf16) {
        const auto random = noise<L>(s, places);
        exp_avg = round_randomly<L>(exp_avg, L::and_u(random, L::set_u(0xffffu)));
        exp_avg_sq = round_randomly<L>(exp_avg_sq, L::template shr<16>(random));
    }
}

// Computes exp_avg / (sqrt(exp_avg_sq / bias_correction2) + eps) from the new moments.
template <typename L>
SUPEROFFLOAD_INLINE typename L::F direction(const Scalars& s, typename L::F exp_avg, typename L::F exp_avg_sq) {
    return L::div(exp_avg, L::fma(L::sqrt(exp_avg_sq), L::set(s.inverse_sqrt_bias2), L::set(s.eps)));
}

// Rounds the decayed master first, as torch does. Rounding the update instead takes a fifth off the error of a step,
// but over 200 steps with weight decay masters then leave torch's by more than the promised millionth.
template <typename L>
SUPEROFFLOAD_INLINE typename L::F next_master(const Scalars& s, typename L::F master, typename L::F q) {
    return L::fma(L::set(-s.step_size), q, L::mul(master, L::set(s.decay)));
}

// Stores NaN as one pattern. A NaN moment makes a NaN master, so one test covers all three.
template <typename L>
SUPEROFFLOAD_INLINE void make_canonical(typename L::F& exp_avg, typename L::F& exp_avg_sq, typename L::F& master) {
    if constexpr (!L::kCanonicalNan) {
        if (__builtin_expect(L::any(L::is_nan(master)), 0)) {
            exp_avg = L::canonical(exp_avg);
            exp_avg_sq = L::canonical(exp_avg_sq);
            master = L::canonical(master);
        }
    }
}

// Estimates the old words by inverse arithmetic. Step and undo compute the very same estimates. At the first step the
// inverse betas are 0 (see freeze): the moments were +0, whatever rounding made of them since.
template <typename L>
SUPEROFFLOAD_INLINE typename L::F estimate_exp_avg(const Scalars& s, typename L::F now, typename L::F increment) {
    return L::fma(L::sub(now, increment), L::set(s.inverse_beta1), L::set(0.0f));
}

template <typename L>
SUPEROFFLOAD_INLINE typename L::F estimate_exp_avg_sq(const Scalars& s, typename L::F now, typename L::F increment) {
    return L::fma(L::sub(now, increment), L::set(s.inverse_beta2), L::set(0.0f));
}

template <typename L>
SUPEROFFLOAD_INLINE typename L::F estimate_master(const Scalars& s, typename L::F now, typename L::F q) {
    return L::mul(L::fma(L::set(s.step_size), q, now), L::set(s.inverse_decay));
}

}  // namespace
}  // namespace superoffload::adam
