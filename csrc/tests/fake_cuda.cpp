// Fakes a CUDA driver without a device, for tests. Device memory is host memory; a stream is a thread that runs
// enqueued work in order, after random delays; an event is what the documentation says it is. So a missing wait shows
// as wrong bits. The fake is strict where a real driver would fail or corrupt memory silently: calls without a current
// context, mapped pointers and asynchronous copies of memory that was not registered, copies across registrations,
// destroyed handles, unknown flags and kernels, words for flags that are not mapped.
//
// This file has the driver's functions. The device is in fake_device.*, its kernels are in fake_kernels.*, and the
// functions by which tests set delays, inject errors and enqueue work of their own are in fake_controls.cpp.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda/streams.h"
#include "fake_device.h"
#include "fake_kernels.h"

using namespace fake;

#define ENTER(symbol) \
    if (const Result result = enter(symbol); result != kSuccess) return result

EXPORT Result cuInit(unsigned) { return enter("cuInit", false); }

EXPORT Result cuGetErrorName(Result error, const char** text) {
    static const std::map<Result, const char*> names = {
        {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
        {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
        {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
        {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
        {kNotFound, "CUDA_ERROR_NOT_FOUND"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"},
        {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    };
    const auto found = names.find(error);
    *text = found == names.end() ? nullptr : found->second;
    if (found == names.end()) return kInvalidValue;
    return kSuccess;
}

EXPORT Result cuGetErrorString(Result, const char** text) {
    *text = "as the fake driver was told";
    return kSuccess;
}

EXPORT Result cuDeviceGet(int* device, int ordinal) {
    if (const Result result = enter("cuDeviceGet", false); result != kSuccess) return result;
    *device = ordinal;
    if (ordinal != 0) return kInvalidValue;
    return kSuccess;
}

EXPORT Result cuDeviceGetPCIBusId(char* text, int length, int) {
    std::snprintf(text, static_cast<std::size_t>(length), "0000:FA:CE.0");
    return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRetain(CUctx_st** context, int) {
    if (const Result result = enter("cuDevicePrimaryCtxRetain", false); result != kSuccess) return result;
    *context = &world().context;
    return kSuccess;
}

EXPORT Result cuDevicePrimaryCtxRelease_v2(int) { return enter("cuDevicePrimaryCtxRelease_v2", false); }

EXPORT Result cuCtxSetCurrent(CUctx_st* context) {
    if (contexts().empty()) contexts().push_back(nullptr);
    contexts().back() = context;
    return kSuccess;
}

EXPORT Result cuCtxPushCurrent_v2(CUctx_st* context) {
    if (context != &world().context) return kInvalidContext;
    contexts().push_back(context);
    return kSuccess;
}

EXPORT Result cuCtxPopCurrent_v2(CUctx_st** context) {
    if (contexts().empty()) return kInvalidContext;
    *context = contexts().back();
    contexts().pop_back();
    return kSuccess;
}

EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
    *mode = 0;
    return kSuccess;
}

EXPORT Result cuStreamQuery(CUstream_st* stream) {
    ENTER("cuStreamQuery");
    return stream_of(stream)->idle() ? kSuccess : kNotReady;
}

EXPORT Result cuStreamWaitEvent(CUstream_st* stream, CUevent_st* event, unsigned flags) {
    ENTER("cuStreamWaitEvent");
    if (flags != 0) return kInvalidValue;
    if (!is_event(event)) return kInvalidHandle;
    std::shared_ptr<Recording> recording;
    CUstream_st* on = nullptr;
    {
        const std::lock_guard<std::mutex> lock(event->mutex);
        recording = event->last;
        on = event->recorded_on;
    }
    World& w = world();
    {
        const std::lock_guard<std::mutex> lock(w.mutex);
        if (w.dropped.count({stream, on}) != 0) return kSuccess;
    }
    if (recording) stream_of(stream)->enqueue([recording] { recording->wait(); }, true);
    return kSuccess;
}

EXPORT Result cuStreamWriteValue32_v2(CUstream_st* stream, DeviceAddress address, std::uint32_t value, unsigned flags) {
    ENTER("cuStreamWriteValue32_v2");
    if (!world().writes_values.load()) return kNotSupported;
    bool any = false;
    if (flags > 1 || address % 4 != 0 || !in_registration(reinterpret_cast<void*>(address), 4, &any)) {
        return kInvalidValue;
    }
    auto* const word = reinterpret_cast<std::atomic<std::uint32_t>*>(address);
    stream_of(stream)->enqueue([word, value] { word->store(value, std::memory_order_release); });
    return kSuccess;
}

EXPORT Result cuEventCreate(CUevent_st** event, unsigned flags) {
    ENTER("cuEventCreate");
    if (flags > 3) return kInvalidValue;
    *event = new CUevent_st;
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.events.insert(*event);
    return kSuccess;
}

EXPORT Result cuEventDestroy_v2(CUevent_st* event) {
    ENTER("cuEventDestroy_v2");
    {
        World& w = world();
        const std::lock_guard<std::mutex> lock(w.mutex);
        if (w.events.erase(event) == 0) return kInvalidHandle;
    }
    delete event;
    return kSuccess;
}

EXPORT Result cuEventRecord(CUevent_st* event, CUstream_st* stream) {
    ENTER("cuEventRecord");
    if (!is_event(event)) return kInvalidHandle;
    auto recording = std::make_shared<Recording>();
    {
        const std::lock_guard<std::mutex> lock(event->mutex);
        event->last = recording;
        event->recorded_on = stream;
    }
    stream_of(stream)->enqueue([recording] { recording->reach(); }, true);
    return kSuccess;
}

EXPORT Result cuEventQuery(CUevent_st* event) {
    ENTER("cuEventQuery");
    if (!is_event(event)) return kInvalidHandle;
    const std::lock_guard<std::mutex> lock(event->mutex);
    return event->last == nullptr || event->last->is_reached() ? kSuccess : kNotReady;
}

EXPORT Result cuMemHostRegister_v2(void* memory, std::size_t bytes, unsigned flags) {
    ENTER("cuMemHostRegister_v2");
    if (memory == nullptr || bytes == 0 || flags > 15) return kInvalidValue;
    bool any = false;
    if (in_registration(memory, bytes, &any) || any) return kAlreadyRegistered;
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    if (bytes > w.registrable) return kOutOfMemory;
    w.registered[static_cast<char*>(memory)] = bytes;
    return kSuccess;
}

EXPORT Result cuMemHostUnregister(void* memory) {
    if (contexts().empty() || contexts().back() == nullptr) return kInvalidContext;
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    if (w.registered.erase(static_cast<char*>(memory)) != 1) return kNotRegistered;
    return kSuccess;
}

EXPORT Result cuMemHostGetDevicePointer_v2(DeviceAddress* address, void* memory, unsigned flags) {
    ENTER("cuMemHostGetDevicePointer_v2");
    if (flags != 0) return kInvalidValue;
    bool any = false;
    if (!in_registration(memory, 1, &any)) return kNotRegistered;
    *address = reinterpret_cast<DeviceAddress>(memory);
    return kSuccess;
}

// Copies like a real driver: with ordinary host memory, a copy down returns once it is made, and a copy up once the
// host memory may be written again.
static Result copy(void* target, const void* source, std::size_t bytes, const void* host, CUstream_st* stream) {
    if (bytes > 0 && (target == nullptr || source == nullptr)) return kInvalidValue;
    bool crosses = false;
    const bool registered = in_registration(host, bytes, &crosses);
    if (crosses) return kInvalidValue;
    stream_of(stream)->enqueue([=] { std::memcpy(target, source, bytes); });
    if (!registered) stream_of(stream)->synchronize();
    return kSuccess;
}

EXPORT Result cuMemcpyDtoHAsync_v2(void* target, DeviceAddress source, std::size_t bytes, CUstream_st* stream) {
    ENTER("cuMemcpyDtoHAsync_v2");
    return copy(target, reinterpret_cast<const void*>(source), bytes, target, stream);
}

EXPORT Result cuMemcpyHtoDAsync_v2(DeviceAddress target, const void* source, std::size_t bytes, CUstream_st* stream) {
    ENTER("cuMemcpyHtoDAsync_v2");
    return copy(reinterpret_cast<void*>(target), source, bytes, source, stream);
}

EXPORT Result cuModuleLoadData(CUmod_st** module, const void*) {
    ENTER("cuModuleLoadData");
    *module = &world().module;
    return kSuccess;
}

EXPORT Result cuModuleUnload(CUmod_st*) { return enter("cuModuleUnload"); }

EXPORT Result cuModuleGetFunction(CUfunc_st** function, CUmod_st*, const char* name) {
    ENTER("cuModuleGetFunction");
    if (kernel_names().count(name) == 0) return kNotFound;
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    *function = new CUfunc_st{name};
    w.functions.insert(*function);
    return kSuccess;
}

// The first parameter of every kernel is a table, the second an unsigned, the others are pointers: pack has three,
// unpack and compare one, step and sum none.
EXPORT Result cuLaunchKernel(CUfunc_st* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                             unsigned, CUstream_st* stream, void** parameters, void**) {
    ENTER("cuLaunchKernel");
    if (grid == 0 || grid > 0x7fffffffu || block == 0 || block > 1024) return kInvalidValue;
    {
        World& w = world();
        const std::lock_guard<std::mutex> lock(w.mutex);
        if (w.functions.count(function) == 0) return kInvalidHandle;
        ++w.calls[function->name];
    }
    const std::string name = function->name;
    const std::size_t count = name[0] == 'p' ? 5 : name[0] == 'u' || name[0] == 'c' ? 3 : 2;
    auto table = *static_cast<superoffload::cuda::TableArgument*>(parameters[0]);
    std::vector<std::uint64_t> values(count, 0);
    for (std::size_t i = 1; i < count; ++i) std::memcpy(&values[i], parameters[i], i == 1 ? 4 : 8);
    stream_of(stream)->enqueue([name, grid, block, table, values]() mutable {
        std::vector<void*> pointers{&table};
        for (std::size_t i = 1; i < values.size(); ++i) pointers.push_back(&values[i]);
        run_kernel(name, grid, block, pointers.data());
    });
    return kSuccess;
}
