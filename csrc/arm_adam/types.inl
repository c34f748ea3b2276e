// Turns the types that a run names into compile-time constants. Part of algorithm.inl.
#pragma once

#include <type_traits>

#include "kernels.h"

namespace superoffload::adam {
namespace {

template <ElementType type>
using ElementConstant = std::integral_constant<ElementType, type>;

// Calls f with fp32 or bf16: fp16 that a block presents as fp32 is fp32 to the loops.
template <typename F>
inline auto with_element_type(ElementType type, F f) {
    if (type == ElementType::bf16) return f(ElementConstant<ElementType::bf16>{});
    return f(ElementConstant<ElementType::f32>{});
}

template <typename F>
inline auto with_any_type(ElementType type, F f) {
    if (type == ElementType::f16) return f(ElementConstant<ElementType::f16>{});
    return with_element_type(type, f);
}

// Loops over fp16 exist only where gradient and shadow both have it, as in a model of fp16. Beside another type it is
// presented as fp32 (in_fp32): loops for all pairs of types would double what is compiled.
inline bool has_fp16_pair(const Run& run) {
    return run.gradient_type == ElementType::f16 && run.shadow_type == ElementType::f16 && run.shadow != nullptr;
}

inline bool presents_fp16(const Run& run) {
    return (run.gradient_type == ElementType::f16 || (run.shadow_type == ElementType::f16 && run.shadow != nullptr)) &&
           !has_fp16_pair(run);
}

// Holds the types of a run as compile-time constants.
template <ElementType gradient_type, ElementType shadow_type, ElementType state_type, bool is_split>
struct Types {
    static constexpr ElementType gradient = gradient_type;
    static constexpr ElementType shadow = shadow_type;  // undo writes that of a split master only
    static constexpr ElementType state = state_type;    // of the moments
    static constexpr bool split = is_split;             // of the master
    static constexpr bool quantized = state_type == ElementType::q8;
};

// Holds the types of loops that write no shadow, or that of a split master.
template <typename T>
using UndoTypes = Types<T::gradient, ElementType::f32, T::state, T::split>;

// Calls f with the type of the run's moments.
template <typename F>
inline auto with_state_type(const Run& run, F f) {
    switch (run.state_type) {
        case ElementType::bf16:
            return f(ElementConstant<ElementType::bf16>{});
        case ElementType::q8:
            return f(ElementConstant<ElementType::q8>{});
        default:
            return f(ElementConstant<ElementType::f32>{});
    }
}

// Calls f with the run's Types, in which fp16 that is presented as fp32 is fp32.
template <typename F>
inline auto with_types(const Run& run, F f) {
    return with_state_type(run, [&](auto state) {
        if (has_fp16_pair(run)) return f(Types<ElementType::f16, ElementType::f16, state.value, false>{});
        return with_element_type(run.gradient_type, [&](auto gradient) {
            if (run.split_master) return f(Types<gradient.value, ElementType::bf16, state.value, true>{});
            return with_element_type(run.shadow_type, [&](auto shadow) {
                return f(Types<gradient.value, shadow.value, state.value, false>{});
            });
        });
    });
}

}  // namespace
}  // namespace superoffload::adam
