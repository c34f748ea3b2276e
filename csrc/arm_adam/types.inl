// Turns the types that a run names into compile-time constants. Part of algorithm.inl.
#pragma once

#include <type_traits>

#include "kernels.h"

namespace superoffload::adam {
namespace {

template <typename F>
inline auto with_element_type(ElementType type, F f) {
    using std::integral_constant;
    switch (type) {
        case ElementType::bf16:
            return f(integral_constant<ElementType, ElementType::bf16>{});
        case ElementType::f16:
            return f(integral_constant<ElementType, ElementType::f16>{});
        default:
            return f(integral_constant<ElementType, ElementType::f32>{});
    }
}

// Holds the types of a run as compile-time constants.
template <ElementType gradient_type, ElementType shadow_type, ElementType state_type, bool is_l2, bool is_split>
struct Types {
    static constexpr ElementType gradient = gradient_type;
    static constexpr ElementType shadow = shadow_type;  // undo writes that of a split master only
    static constexpr ElementType state = state_type;    // of the moments
    static constexpr bool l2 = is_l2;
    static constexpr bool split = is_split;  // of the master
    static constexpr bool quantized = state_type == ElementType::q8;
};

// Holds the types of loops that write no shadow, or that of a split master.
template <typename T>
using UndoTypes = Types<T::gradient, ElementType::f32, T::state, T::l2, T::split>;

template <typename F>
inline auto with_flag(bool flag, F f) {
    return flag ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f with the types of the run's moments and gradient, and whether it is Adam with an L2 penalty.
template <typename F>
inline auto with_state_types(const Run& run, F f) {
    return with_element_type(run.gradient_type, [&](auto gradient) {
        return with_flag(run.frozen.l2, [&](auto l2) {
            using std::integral_constant;
            switch (run.state_type) {
                case ElementType::bf16:
                    return f(gradient, integral_constant<ElementType, ElementType::bf16>{}, l2);
                case ElementType::q8:
                    return f(gradient, integral_constant<ElementType, ElementType::q8>{}, l2);
                default:
                    return f(gradient, integral_constant<ElementType, ElementType::f32>{}, l2);
            }
        });
    });
}

// Calls f with the run's Types.
template <typename F>
inline auto with_types(const Run& run, F f) {
    return with_state_types(run, [&](auto gradient, auto state, auto l2) {
        if (run.split_master) return f(Types<gradient.value, ElementType::bf16, state.value, l2.value, true>{});
        return with_element_type(run.shadow_type, [&](auto shadow) {
            return f(Types<gradient.value, shadow.value, state.value, l2.value, false>{});
        });
    });
}

// Calls f with the run's UndoTypes.
template <typename F>
inline auto with_undo_types(const Run& run, F f) {
    return with_state_types(run, [&](auto gradient, auto state, auto l2) {
        return with_flag(run.split_master, [&](auto split) {
            return f(Types<gradient.value, ElementType::f32, state.value, l2.value, split.value>{});
        });
    });
}

}  // namespace
}  // namespace superoffload::adam
