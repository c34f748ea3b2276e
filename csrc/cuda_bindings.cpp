// Binds csrc/cuda/ to Python: addresses and stream handles in, as in bindings.cpp.
#include "cuda_bindings.h"

#include <pybind11/stl.h>

#include "arm_adam/adam.h"
#include "cuda/device_bucket.h"
#include "cuda/device_sums.h"
#include "cuda/driver.h"
#include "cuda/pinned.h"
#include "cuda/pipeline.h"

namespace py = pybind11;
namespace adam = superoffload::adam;
namespace cuda = superoffload::cuda;
using superoffload::Completion;

namespace {

using Address = std::uintptr_t;

template <typename T>
T pointer(Address address) {
    return reinterpret_cast<T>(address);  // NOLINT: addresses are what crosses this border
}

std::vector<cuda::Stream> streams_at(const std::vector<Address>& handles) {
    std::vector<cuda::Stream> streams;
    for (const Address handle : handles) streams.push_back(pointer<cuda::Stream>(handle));
    return streams;
}

// Releases the interpreter's lock only inside the function: pybind11 registers a constructed object in tables that the
// lock guards, before a call guard would take it again.
std::shared_ptr<cuda::Gpu> open_gpu(const std::string& library, int ordinal) {
    const py::gil_scoped_release release;
    return std::make_shared<cuda::Gpu>(cuda::Driver::load(library), ordinal);
}

std::shared_ptr<cuda::PinnedMemory> make_pinned(std::shared_ptr<cuda::Gpu> gpu, std::size_t bytes, int node,
                                                bool strict, unsigned threads, std::size_t chunk) {
    const cuda::PinnedRequest request{bytes, node, strict, threads, chunk};
    const py::gil_scoped_release release;
    return std::make_shared<cuda::PinnedMemory>(std::move(gpu), request);
}

std::shared_ptr<cuda::Pipeline> make_pipeline(std::shared_ptr<cuda::Gpu> gpu, Address pack, Address down, Address up,
                                              Address flag, const py::bytes& image, double timeout_seconds) {
    const std::string code = image;
    const cuda::Streams streams{pointer<cuda::Stream>(pack), pointer<cuda::Stream>(down), pointer<cuda::Stream>(up)};
    const py::gil_scoped_release release;
    return cuda::Pipeline::create(std::move(gpu), streams, pointer<void*>(flag), code, timeout_seconds);
}

std::shared_ptr<cuda::DeviceBucket> make_bucket(
    cuda::Pipeline& pipeline, const std::vector<std::tuple<std::uint64_t, std::uint64_t, Address>>& pieces,
    adam::ElementType gradient_type, adam::ElementType published_type, Address packed, Address shadow, Address scratch,
    cuda::DeviceAddress device_scratch, cuda::DeviceAddress resident, const std::string& step_kernel) {
    cuda::BucketSpec spec;
    for (const auto& [offset, numel, block_sums] : pieces) {
        spec.pieces.push_back({offset, numel, pointer<double*>(block_sums)});
    }
    spec.gradient_type = gradient_type;
    spec.published_type = published_type;
    spec.packed = pointer<void*>(packed);
    spec.shadow = pointer<void*>(shadow);
    spec.scratch = pointer<void*>(scratch);
    spec.device_scratch = device_scratch;
    spec.resident = resident;
    spec.step_kernel = step_kernel;
    const py::gil_scoped_release release;
    return pipeline.make_bucket(spec);
}

// Holds (address, bytes, address of the sums) of each run.
using Runs = std::vector<std::tuple<cuda::DeviceAddress, std::uint64_t, cuda::DeviceAddress>>;

std::vector<cuda::SummedRun> summed(const Runs& runs) {
    std::vector<cuda::SummedRun> found;
    found.reserve(runs.size());
    for (const auto& [memory, bytes, sums] : runs) found.push_back({memory, bytes, sums});
    return found;
}

using Release = py::call_guard<py::gil_scoped_release>;

void bind_memory(py::module_& module) {
    py::class_<cuda::Gpu, std::shared_ptr<cuda::Gpu>>(module, "CudaGpu")
        .def(py::init(&open_gpu), py::arg("library"), py::arg("ordinal"))
        .def_property_readonly("pci_bus_id", &cuda::Gpu::pci_bus_id);
    py::class_<cuda::PinnedMemory, std::shared_ptr<cuda::PinnedMemory>>(module, "PinnedMemory", py::buffer_protocol())
        .def(py::init(&make_pinned), py::arg("gpu"), py::arg("bytes"), py::arg("node"), py::arg("strict"),
             py::arg("threads"), py::arg("chunk"))
        .def_buffer([](cuda::PinnedMemory& memory) {
            return py::buffer_info(static_cast<std::uint8_t*>(memory.data()), static_cast<py::ssize_t>(memory.bytes()));
        })
        .def("unpin", &cuda::PinnedMemory::unpin, Release())
        .def("leak", &cuda::PinnedMemory::leak)
        .def_property_readonly("chunk", &cuda::PinnedMemory::chunk)
        .def_property_readonly("pinned", &cuda::PinnedMemory::pinned)
        .def_property_readonly("refusal", &cuda::PinnedMemory::refusal);
}

void bind_pipeline(py::module_& module) {
    const auto release = Release();
    module.def("cuda_scratch_bytes", &cuda::scratch_bytes, py::arg("numels"));
    py::class_<cuda::DeviceBucket, std::shared_ptr<cuda::DeviceBucket>>(module, "DeviceBucket");
    py::class_<cuda::SumsTable, std::shared_ptr<cuda::SumsTable>>(module, "CudaSumsTable")
        .def_static("bytes", &cuda::SumsTable::bytes, py::arg("runs"))
        .def_property_readonly("capacity", &cuda::SumsTable::capacity)
        .def("is_free", &cuda::SumsTable::is_free, release);
    module.attr("SUMMED_BYTES") = cuda::kSummedBytes;
    py::class_<cuda::Pipeline, std::shared_ptr<cuda::Pipeline>>(module, "CudaPipeline")
        .def(py::init(&make_pipeline), py::arg("gpu"), py::arg("pack"), py::arg("down"), py::arg("up"), py::arg("flag"),
             py::arg("image"), py::arg("timeout_seconds"))
        .def_property_readonly("has_kernels", &cuda::Pipeline::has_kernels)
        .def_property_readonly("uses_flag", &cuda::Pipeline::uses_flag)
        .def_property_readonly("bytes_early", &cuda::Pipeline::bytes_early)
        .def(
            "set_staging",
            [](cuda::Pipeline& pipeline, cuda::DeviceAddress down, std::uint64_t slot_bytes, unsigned slots,
               cuda::DeviceAddress up) { pipeline.set_staging({down, slot_bytes, slots, up}); },
            py::arg("down"), py::arg("slot_bytes"), py::arg("slots"), py::arg("up"), release)
        .def("make_bucket", &make_bucket, py::arg("pieces"), py::arg("gradient_type"), py::arg("published_type"),
             py::arg("packed"), py::arg("shadow"), py::arg("scratch"), py::arg("device_scratch"),
             py::arg("resident") = 0, py::arg("step_kernel") = "")
        .def(
            "pack",
            [](cuda::Pipeline& pipeline, const std::shared_ptr<cuda::DeviceBucket>& bucket, Address current,
               const std::vector<cuda::DeviceAddress>& addresses, bool keep, const std::vector<Address>& others,
               cuda::DeviceAddress block, cuda::DeviceAddress bit_sums) {
                return pipeline.pack(bucket, pointer<cuda::Stream>(current), addresses, keep, streams_at(others), block,
                                     bit_sums);
            },
            py::arg("bucket"), py::arg("current"), py::arg("addresses"), py::arg("keep"), py::arg("others"),
            py::arg("block"), py::arg("bit_sums") = 0, release)
        .def(
            "hold_back",
            [](cuda::Pipeline& pipeline, const std::shared_ptr<cuda::DeviceBucket>& bucket, Address stream) {
                pipeline.hold_back(bucket, pointer<cuda::Stream>(stream));
            },
            py::arg("bucket"), py::arg("stream"), release)
        .def("stage", &cuda::Pipeline::stage, py::arg("bucket"), py::arg("after"), py::arg("present"), release)
        .def("unstage", &cuda::Pipeline::unstage, py::arg("bucket"), release)
        .def(
            "release",
            [](cuda::Pipeline& pipeline, const std::shared_ptr<cuda::DeviceBucket>& bucket, Address stream) {
                pipeline.release(bucket, pointer<cuda::Stream>(stream));
            },
            py::arg("bucket"), py::arg("stream"), release)
        .def(
            "deliver",
            [](cuda::Pipeline& pipeline, const std::shared_ptr<cuda::DeviceBucket>& bucket,
               const std::shared_ptr<Completion>& after, Address current,
               const std::vector<cuda::DeviceAddress>& addresses) {
                return pipeline.deliver(bucket, after, pointer<cuda::Stream>(current), addresses);
            },
            py::arg("bucket"), py::arg("after"), py::arg("current"), py::arg("addresses"), release)
        .def(
            "make_visible",
            [](cuda::Pipeline& pipeline, const std::shared_ptr<cuda::DeviceBucket>& bucket, Address current) {
                pipeline.make_visible(bucket, pointer<cuda::Stream>(current));
            },
            py::arg("bucket"), py::arg("current"), release)
        .def(
            "step",
            [](cuda::Pipeline& pipeline, const std::shared_ptr<cuda::DeviceBucket>& bucket, Address current,
               const py::bytes& table, unsigned count, std::uint64_t blocks, cuda::DeviceAddress device_table) {
                std::string contents = table;
                const py::gil_scoped_release released;
                return pipeline.step(bucket, pointer<cuda::Stream>(current), std::move(contents), count, blocks,
                                     device_table);
            },
            py::arg("bucket"), py::arg("current"), py::arg("table"), py::arg("count"), py::arg("blocks"),
            py::arg("device_table"))
        .def("has_stepped", &cuda::Pipeline::has_stepped, py::arg("bucket"), release)
        .def(
            "make_sums_table",
            [](cuda::Pipeline& pipeline, Address host, cuda::DeviceAddress device, std::size_t runs) {
                return pipeline.make_sums_table(pointer<void*>(host), device, runs);
            },
            py::arg("host"), py::arg("device"), py::arg("runs"), release)
        .def(
            "take_sums",
            [](cuda::Pipeline& pipeline, cuda::SumsTable& table, Address current, const Runs& runs) {
                pipeline.take_sums(table, pointer<cuda::Stream>(current), summed(runs));
            },
            py::arg("table"), py::arg("current"), py::arg("runs"), release)
        .def(
            "compare_sums",
            [](cuda::Pipeline& pipeline, cuda::SumsTable& table, Address current, const Runs& runs) {
                return pipeline.compare_sums(table, pointer<cuda::Stream>(current), summed(runs));
            },
            py::arg("table"), py::arg("current"), py::arg("runs"), release)
        .def("drain", &cuda::Pipeline::drain, py::arg("timeout_seconds"), release)
        .def("close", &cuda::Pipeline::close, py::kw_only(), py::arg("keep_kernels") = false, release);
}

}  // namespace

void bind_cuda(py::module_& module) {
    py::register_exception<cuda::DriverError>(module, "DriverError", PyExc_RuntimeError);
    bind_memory(module);
    bind_pipeline(module);
}
