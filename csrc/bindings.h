// What superoffload/_native.pyx calls beside the classes themselves: raw addresses become pointers, and C++ exceptions
// Python's. The Python side checks dtype, device, contiguity and lifetime before an address crosses.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arm_adam/adam.h"
#include "cuda/driver.h"
#include "cuda/pinned.h"
#include "cuda/pipeline.h"
#include "runtime/bit_sums.h"
#include "runtime/bucket_work.h"
#include "runtime/completion.h"
#include "runtime/worker_pool.h"

namespace superoffload::bindings {

using Address = std::uintptr_t;

template <typename T>
T pointer(Address address) {
    return reinterpret_cast<T>(address);  // NOLINT: addresses are what crosses this border
}

template <typename T>
std::vector<T> pointers(const std::vector<Address>& addresses) {
    std::vector<T> found;
    found.reserve(addresses.size());
    for (const Address address : addresses) found.push_back(pointer<T>(address));
    return found;
}

// The exception classes that are not Python's own, which the module gives once and keeps.
inline PyObject* driver_error = nullptr;
inline PyObject* threads_refused = nullptr;

inline void set_exceptions(PyObject* of_driver, PyObject* of_threads) {
    Py_INCREF(of_driver);
    Py_INCREF(of_threads);
    driver_error = of_driver;
    threads_refused = of_threads;
}

// Sets Python's error from the C++ exception that is being handled.
inline void set_python_error() {
    try {
        throw;
    } catch (const cuda::DriverError& error) {
        PyErr_SetString(driver_error, error.what());
    } catch (const ThreadsRefused& error) {
        PyErr_SetString(threads_refused, error.what());
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc& error) {
        PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

inline adam::ElementType element_type(int value) {
    if (value < 0 || value > 3) throw std::invalid_argument("ElementType: " + std::to_string(value) + ", expected 0-3");
    return static_cast<adam::ElementType>(value);
}

inline Operation operation(int value) {
    if (value < 0 || value > 5) throw std::invalid_argument("Operation: " + std::to_string(value) + ", expected 0-5");
    return static_cast<Operation>(value);
}

// Makes an empty run, whose types it checks; the module fills in the rest.
inline RunOfShard make_run(int gradient_type, int shadow_type, int state_type, bool split_master, bool has_scales,
                           std::size_t numel) {
    using adam::ElementType;
    adam::Run run{};
    run.gradient_type = element_type(gradient_type);
    run.shadow_type = element_type(shadow_type);
    run.state_type = element_type(state_type);
    run.split_master = split_master;
    run.numel = numel;
    if (run.state_type == ElementType::f16) throw std::invalid_argument("state_type: f16, expected f32, bf16 or q8");
    if (run.gradient_type == ElementType::q8 || run.shadow_type == ElementType::q8) {
        throw std::invalid_argument("gradient_type, shadow_type: q8 is for moments; expected f32, bf16 or f16");
    }
    if (numel != 0 && (run.state_type == ElementType::q8) != has_scales) {
        throw std::invalid_argument("exp_avg_scales, exp_avg_sq_scales: expected both with q8 moments, and only there");
    }
    if (split_master && run.shadow_type != ElementType::bf16) {
        throw std::invalid_argument("shadow_type: only bf16 has the upper half of a split master");
    }
    return {run, 0};
}

// Sets the axes of a run from (length, stride), the innermost first.
inline void set_axes(adam::Run& run, const std::vector<std::pair<std::uint64_t, std::uint32_t>>& axes) {
    if (axes.size() > adam::kMaxAxes) {
        throw std::invalid_argument("axes: " + std::to_string(axes.size()) + ", expected at most " +
                                    std::to_string(adam::kMaxAxes));
    }
    for (const auto& [length, stride] : axes) {
        if (length == 0) throw std::invalid_argument("axes: a length of 0, expected 1 or more");
        run.axes[run.axis_count++] = {length, stride};
    }
}

// Returns both sums of each (address, bytes).
inline std::vector<BitSums> sums_of(const std::vector<std::pair<Address, std::size_t>>& runs, unsigned threads) {
    std::vector<Memory> memory;
    memory.reserve(runs.size());
    for (const auto& [address, bytes] : runs) memory.push_back({pointer<const void*>(address), bytes});
    return bit_sums(memory, threads);
}

inline std::shared_ptr<cuda::Gpu> open_gpu(const std::string& library, int ordinal) {
    return std::make_shared<cuda::Gpu>(cuda::Driver::load(library), ordinal);
}

inline std::shared_ptr<cuda::PinnedMemory> make_pinned(std::shared_ptr<cuda::Gpu> gpu,
                                                       const cuda::PinnedRequest& request) {
    return std::make_shared<cuda::PinnedMemory>(std::move(gpu), request);
}

inline std::vector<std::string> available_isas() {
    const char* names[8];
    const std::size_t count = adam::available_isas(names, 8);
    return {names, names + count};
}

// Waits for at most `seconds` (negative: for ever) and 0.1 s, so that the caller can look for signals. 1: done, 0: the
// time is up, -1: call again. `until`: when the time is up, for the next call.
inline int wait_a_little(Completion& completion, double until) {
    double slice = 0.1;
    if (until >= 0) slice = std::min(slice, std::max(0.0, until - now_seconds()));
    if (completion.wait(slice)) return 1;
    return until >= 0 && now_seconds() >= until ? 0 : -1;
}

}  // namespace superoffload::bindings
