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
template <ElementType gradient_type, ElementType shadow_type, ElementType state_type, bool is_l2>
struct Types {
    static constexpr ElementType gradient = gradient_type;
    static constexpr ElementType shadow = shadow_type;  // undo does not write it, and ignores this
    static constexpr ElementType state = state_type;    // of the moments
    static constexpr bool l2 = is_l2;
};

// Holds the types of loops that write no shadow.
template <typename T>
using UndoTypes = Types<T::gradient, ElementType::f32, T::state, T::l2>;

template <typename F>
inline auto with_flag(bool flag, F f) {
    return flag ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f with the run's Types.
template <typename F>
inline auto with_types(const Run& run, ElementType shadow_type, F f) {
    return with_element_type(run.gradient_type, [&](auto gradient) {
        return with_element_type(shadow_type, [&](auto shadow) {
            return with_flag(run.state_type == ElementType::bf16, [&](auto narrow_state) {
                return with_flag(run.frozen.l2, [&](auto l2) {
                    constexpr ElementType state = narrow_state.value ? ElementType::bf16 : ElementType::f32;
                    return f(Types<gradient.value, shadow.value, state, l2.value>{});
                });
            });
        });
    });
}

}  // namespace
}  // namespace superoffload::adam
