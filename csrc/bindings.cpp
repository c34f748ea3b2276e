// Binds the C++ extension to Python: raw addresses in, no torch and no NumPy types. The Python side checks dtype,
// device, contiguity and lifetime before an address crosses (superoffload/kernels.py, superoffload/engine/bucket.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arm_adam/adam.h"
#include "cuda_bindings.h"
#include "runtime/bit_sums.h"
#include "runtime/bucket_work.h"
#include "runtime/completion.h"
#include "runtime/host_pieces.h"
#include "runtime/huge_pages.h"
#include "runtime/worker_pool.h"

namespace py = pybind11;
using superoffload::BucketWork;
using superoffload::Completion;
using superoffload::JournalMemory;
using superoffload::Operation;
using superoffload::WorkerPool;
namespace adam = superoffload::adam;

namespace {

using Address = std::uintptr_t;

template <typename T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);  // NOLINT: addresses are what crosses this border
}

using Axes = std::vector<std::pair<std::uint64_t, std::uint32_t>>;

// Sets the axes of a run from (length, stride), the innermost first.
void set_axes(adam::Run& run, const Axes& axes) {
    if (axes.size() > adam::kMaxAxes) {
        throw std::invalid_argument("axes: " + std::to_string(axes.size()) + ", expected at most " +
                                    std::to_string(adam::kMaxAxes));
    }
    for (const auto& [length, stride] : axes) {
        if (length == 0) throw std::invalid_argument("axes: a length of 0, expected 1 or more");
        run.axes[run.axis_count++] = {length, stride};
    }
}

superoffload::RunOfShard make_run(Address master, Address exp_avg, Address exp_avg_sq, Address gradient, Address shadow,
                                  std::size_t numel, adam::ElementType gradient_type, adam::ElementType shadow_type,
                                  adam::ElementType state_type, std::uint64_t first_index, std::uint32_t start,
                                  const Axes& axes, std::uint64_t noise_stream, bool past_cache, bool split_master,
                                  Address exp_avg_scales, Address exp_avg_sq_scales) {
    using adam::ElementType;
    if (state_type == ElementType::f16) throw std::invalid_argument("state_type: f16, expected f32, bf16 or q8");
    if (gradient_type == ElementType::q8 || shadow_type == ElementType::q8) {
        throw std::invalid_argument("gradient_type, shadow_type: q8 is for moments; expected f32, bf16 or f16");
    }
    const bool has_scales = exp_avg_scales != 0 && exp_avg_sq_scales != 0;
    if (numel != 0 && (state_type == ElementType::q8) != has_scales) {
        throw std::invalid_argument("exp_avg_scales, exp_avg_sq_scales: expected both with q8 moments, and only there");
    }
    if (split_master && shadow_type != adam::ElementType::bf16) {
        throw std::invalid_argument("shadow_type: only bf16 has the upper half of a split master");
    }
    adam::Run run{};
    run.master = pointer<void>(master);
    run.exp_avg = pointer<void>(exp_avg);
    run.exp_avg_sq = pointer<void>(exp_avg_sq);
    run.gradient = pointer<const void>(gradient);
    run.shadow = pointer<void>(shadow);
    run.numel = numel;
    run.gradient_type = gradient_type;
    run.shadow_type = shadow_type;
    run.state_type = state_type;
    run.first_index = first_index;
    run.start = start;
    set_axes(run, axes);
    run.past_cache = past_cache;
    run.split_master = split_master;
    run.exp_avg_scales = pointer<std::uint8_t>(exp_avg_scales);
    run.exp_avg_sq_scales = pointer<std::uint8_t>(exp_avg_sq_scales);
    return {run, noise_stream};
}

void set_gradients(BucketWork& work, const std::vector<Address>& addresses) {
    std::vector<const void*> gradients;
    gradients.reserve(addresses.size());
    for (const Address address : addresses) gradients.push_back(pointer<const void>(address));
    work.set_gradients(gradients);
}

void freeze(BucketWork& work, double lr, double beta1, double beta2, double eps, double weight_decay,
            double gradient_factor, bool l2, const std::vector<std::uint64_t>& steps) {
    work.freeze({lr, beta1, beta2, eps, weight_decay, 0, gradient_factor, l2}, steps);
}

// Freezes the scalars of one step as bytes, for kernels that are launched elsewhere.
py::bytes freeze_scalars(double lr, double beta1, double beta2, double eps, double weight_decay, double gradient_factor,
                         bool l2, std::uint64_t step, std::uint64_t noise_stream) {
    const adam::Scalars frozen =
        adam::freeze({lr, beta1, beta2, eps, weight_decay, step, gradient_factor, l2}, noise_stream);
    return {reinterpret_cast<const char*>(&frozen), sizeof frozen};
}

// Returns both sums of each (address, bytes) as 16 bytes, which Python compares as one object. Releases the GIL once
// for all of them.
std::vector<py::bytes> bit_sums(const std::vector<std::pair<Address, std::size_t>>& runs, unsigned threads) {
    std::vector<superoffload::BitSums> sums;
    {
        const py::gil_scoped_release release;
        std::vector<superoffload::Memory> memory;
        memory.reserve(runs.size());
        for (const auto& [address, bytes] : runs) memory.push_back({pointer<const void>(address), bytes});
        sums = superoffload::bit_sums(memory, threads);
    }
    std::vector<py::bytes> found;
    found.reserve(sums.size());
    for (const auto& one : sums) found.emplace_back(reinterpret_cast<const char*>(&one), sizeof(one));  // NOLINT
    return found;
}

template <typename T>
std::vector<T*> pointers(const std::vector<Address>& addresses) {
    std::vector<T*> found;
    found.reserve(addresses.size());
    for (const Address address : addresses) found.push_back(pointer<T>(address));
    return found;
}

void bind_host_pieces(py::module_& module) {
    using superoffload::HostPieces;
    py::class_<HostPieces>(module, "HostPieces")
        .def(py::init<adam::ElementType>(), py::arg("gradient_type"))
        .def(
            "add",
            [](HostPieces& pieces, Address packed, std::size_t numel, Address block_sums, Address shadow,
               std::size_t shadow_bytes) {
                pieces.add(pointer<void>(packed), numel, pointer<double>(block_sums), pointer<const void>(shadow),
                           shadow_bytes);
            },
            py::arg("packed"), py::arg("numel"), py::arg("block_sums"), py::arg("shadow"), py::arg("shadow_bytes"))
        .def(
            "pack",
            [](const HostPieces& pieces, const std::vector<Address>& gradients) {
                const py::gil_scoped_release release;
                pieces.pack(pointers<const void>(gradients));
            },
            py::arg("gradients"))
        .def(
            "publish",
            [](const HostPieces& pieces, const std::vector<Address>& parameters) {
                const py::gil_scoped_release release;
                pieces.publish(pointers<void>(parameters));
            },
            py::arg("parameters"));
}

// Folds each shard's sums separately, so that each keeps its fixed order.
std::vector<double> fold_sums(const std::vector<std::pair<Address, std::size_t>>& sums) {
    std::vector<double> folded;
    folded.reserve(sums.size());
    for (const auto& [block_sums, count] : sums) {
        folded.push_back(adam::fold_sums(pointer<const double>(block_sums), count));
    }
    return folded;
}

// Returns true once done, false when the time is up; a failure becomes a RuntimeError. Wakes up for signals (Ctrl-C).
bool wait(Completion& completion, double timeout_seconds) {
    const double until = superoffload::now_seconds() + timeout_seconds;
    for (;;) {
        bool done = false;
        {
            const py::gil_scoped_release release;
            double slice = 0.1;
            if (timeout_seconds >= 0) slice = std::min(slice, std::max(0.0, until - superoffload::now_seconds()));
            done = completion.wait(slice);
        }
        if (done) break;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (timeout_seconds >= 0 && superoffload::now_seconds() >= until) return false;
    }
    const std::string error = completion.error();
    if (!error.empty()) throw std::runtime_error(error);
    return true;
}

std::vector<std::string> available_isas() {
    const char* names[8];
    const std::size_t count = adam::available_isas(names, 8);
    return {names, names + count};
}

void bind_kernels(py::module_& module) {
    py::enum_<adam::ElementType>(module, "ElementType")
        .value("f32", adam::ElementType::f32)
        .value("bf16", adam::ElementType::bf16)
        .value("f16", adam::ElementType::f16)
        .value("q8", adam::ElementType::q8);
    py::class_<superoffload::RunOfShard>(module, "Run")
        .def(py::init(&make_run), py::arg("master"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("gradient"),
             py::arg("shadow"), py::arg("numel"), py::arg("gradient_type"), py::arg("shadow_type"),
             py::arg("state_type") = adam::ElementType::f32, py::arg("first_index") = 0, py::arg("start") = 0,
             py::arg("axes") = Axes{}, py::arg("noise_stream") = 0, py::arg("past_cache") = false,
             py::arg("split_master") = false, py::arg("exp_avg_scales") = 0, py::arg("exp_avg_sq_scales") = 0);
    module.attr("BLOCK") = adam::kBlock;
    module.attr("MAX_AXES") = adam::kMaxAxes;
    module.attr("MOMENT_BLOCK") = adam::kMomentBlock;
    module.attr("CHUNK") = superoffload::kChunk;
    module.def(
        "prefer_huge_pages",
        [](Address array, std::size_t bytes) { superoffload::prefer_huge_pages(pointer<void>(array), bytes); },
        py::arg("array"), py::arg("bytes"));
    module.def("available_isas", &available_isas);
    module.def("current_isa", &adam::current_isa);
    module.def("set_isa", [](const std::string& name) { return adam::set_isa(name.c_str()); }, py::arg("name"));
    module.def(
        "pack",
        [](Address gradient, Address packed, adam::ElementType type, std::size_t numel, Address block_sums) {
            adam::pack(pointer<const void>(gradient), pointer<void>(packed), type, numel, pointer<double>(block_sums));
        },
        py::arg("gradient"), py::arg("packed"), py::arg("type"), py::arg("numel"), py::arg("block_sums"),
        py::call_guard<py::gil_scoped_release>());
    module.def("bit_sums", &bit_sums, py::arg("runs"), py::arg("threads"));
    module.def("freeze_scalars", &freeze_scalars, py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
               py::arg("weight_decay"), py::arg("gradient_factor"), py::arg("l2"), py::arg("step"),
               py::arg("noise_stream") = 0);
    module.def("fold_sums", &fold_sums, py::arg("sums"));
    bind_host_pieces(module);
}

std::shared_ptr<WorkerPool> make_pool(const std::vector<int>& cpus) {
    try {
        return WorkerPool::create(cpus);
    } catch (const superoffload::ThreadsRefused& error) {
        py::set_error(py::module_::import("superoffload.errors").attr("SuperOffloadError"), error.what());
        throw py::error_already_set();
    }
}

void bind_runtime(py::module_& module) {
    py::enum_<Operation>(module, "Operation")
        .value("step", Operation::step)
        .value("step_journaled", Operation::step_journaled)
        .value("undo", Operation::undo)
        .value("replay", Operation::replay)
        .value("publish", Operation::publish)
        .value("settle", Operation::settle);
    py::class_<superoffload::JournalUse>(module, "JournalUse")
        .def_readonly("bytes", &superoffload::JournalUse::bytes)
        .def_property_readonly("escapes",
                               [](const superoffload::JournalUse& use) {
                                   return py::make_tuple(use.escapes[0], use.escapes[1], use.escapes[2]);
                               })
        .def_readonly("narrow_escapes", &superoffload::JournalUse::narrow_escapes);
    py::class_<JournalMemory, std::shared_ptr<JournalMemory>>(module, "JournalMemory")
        .def(py::init<std::uint64_t, std::uint64_t>(), py::arg("bytes"), py::arg("kept"))
        .def_property_readonly("bytes", &JournalMemory::bytes)
        .def_property_readonly("held", &JournalMemory::held)
        .def_property_readonly("users", &JournalMemory::users);
    py::class_<BucketWork, std::shared_ptr<BucketWork>>(module, "BucketWork")
        .def(py::init<std::vector<superoffload::RunOfShard>, std::shared_ptr<JournalMemory>>(), py::arg("runs"),
             py::arg("journal"))
        .def(py::init<std::vector<superoffload::RunOfShard>, std::uint64_t>(), py::arg("runs"),
             py::arg("journal_bytes"))
        .def("set_gradients", &set_gradients, py::arg("gradients"))
        .def("freeze", &freeze, py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
             py::arg("weight_decay"), py::arg("gradient_factor"), py::arg("l2"), py::arg("steps"))
        .def("run_all", &BucketWork::run_all, py::arg("operation"), py::arg("width") = 1,
             py::call_guard<py::gil_scoped_release>())
        .def("take_journal", &BucketWork::take_journal, py::arg("width"))
        .def("take_halves", &BucketWork::take_halves)
        .def("release_journal", &BucketWork::release_journal)
        .def_property_readonly("publishes", &BucketWork::publishes)
        .def("journal_use", &BucketWork::journal_use)
        .def_property_readonly("overflowed", &BucketWork::overflowed)
        .def_property_readonly("numel", &BucketWork::numel);
    py::class_<Completion, std::shared_ptr<Completion>>(module, "Completion")
        .def(py::init<>())
        .def_static("already_done", &Completion::already_done)
        .def("done", &Completion::done)
        .def("wait", &wait, py::arg("timeout_seconds") = -1.0)
        .def("finish", &Completion::finish)
        .def("fail", &Completion::fail, py::arg("error"))
        .def_property_readonly("error", &Completion::error)
        .def_property_readonly("began", [](const Completion& completion) { return completion.began.load(); })
        .def_property_readonly("ended", [](const Completion& completion) { return completion.ended.load(); });
    const auto release = py::call_guard<py::gil_scoped_release>();
    py::class_<WorkerPool, std::shared_ptr<WorkerPool>>(module, "WorkerPool")
        .def(py::init(&make_pool), py::arg("cpus"))  // quick: starts threads
        .def("submit", &WorkerPool::submit, py::arg("work"), py::arg("operation"), py::arg("width") = 1,
             py::arg("after") = nullptr, release)
        .def("run", &WorkerPool::run, py::arg("work"), py::arg("operation"), release)
        .def("withdraw", &WorkerPool::withdraw, py::arg("done"), release)
        .def("close", &WorkerPool::close, release)
        .def("enter", &WorkerPool::enter)
        .def("leave", &WorkerPool::leave)
        .def("inject_fault", &WorkerPool::inject_fault, py::arg("chunks_until"), py::arg("message"))
        .def_property_readonly("busy_seconds", &WorkerPool::busy_seconds)
        .def_property_readonly("threads", &WorkerPool::threads);
    module.def("now_seconds", &superoffload::now_seconds);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "superoffload's C++ extension; use superoffload.kernels and superoffload.AdamW";
    bind_kernels(module);
    bind_runtime(module);
    bind_cuda(module);
}
