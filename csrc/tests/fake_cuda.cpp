// A CUDA driver without a device, for tests: device memory is host memory, a stream is a thread that runs what was
// enqueued in order, after random delays, and an event is what the documentation says it is, so that a wait that is
// missing shows as wrong bits. Strict where a real driver would fail or corrupt memory silently: calls without a
// current context, mapped pointers and asynchronous copies of memory that was not registered, copies across
// registrations; handles that are gone, flags and kernels that do not exist, words for flags that are not mapped.
//
// fake_cuda_* functions let tests set delays, inject errors, and put work of their own on streams. Kernels: those of
// the library named in FAKE_CUDA_KERNELS (emulate_launch), or plain loops of the same meaning.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arm_adam/lanes_scalar.h"
#include "cuda/driver.h"
#include "cuda/pipeline.h"

using superoffload::adam::ScalarLanes;
using superoffload::cuda::CopyPiece;
using superoffload::cuda::DeviceAddress;
using superoffload::cuda::Result;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum : Result {
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kInvalidContext = 201,
    kInvalidHandle = 400,
    kNotFound = 500,
    kNotReady = 600,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
    kNotSupported = 801,
};

// What an event waits for: one recording of it.
struct Recording {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;

    void reach() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            reached = true;
        }
        changed.notify_all();
    }
    bool is_reached() {
        const std::lock_guard<std::mutex> lock(mutex);
        return reached;
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return reached; });
    }
};

}  // namespace

struct CUstream_st;
struct CUctx_st {};
struct CUmod_st {};
struct CUfunc_st {
    std::string name;
};
struct CUevent_st {
    std::mutex mutex;
    std::shared_ptr<Recording> last;
    CUstream_st* recorded_on = nullptr;
};

struct CUstream_st {
    CUstream_st() : thread([this] { run(); }) { thread.detach(); }

    // `always`: also on a device that has failed, so that streams become idle there too.
    void enqueue(std::function<void()> operation, bool always = false);
    bool idle() {
        const std::lock_guard<std::mutex> lock(mutex);
        return queue.empty();
    }
    void synchronize() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return queue.empty(); });
    }
    void run();

    std::mutex mutex;
    std::condition_variable changed;
    struct Operation {
        double delay;
        bool always;
        std::function<void()> run;
    };
    std::deque<Operation> queue;  // the front one is running
    std::thread thread;
};

namespace {

// Never destroyed: the threads of streams outlive main().
struct World {
    std::mutex mutex;
    std::mt19937_64 random{1};
    double longest_delay = 0;                                // seconds
    std::map<std::string, std::pair<int, Result>> failures;  // symbol -> calls until it fails
    std::map<std::string, long> calls;
    std::set<std::pair<CUstream_st*, CUstream_st*>> dropped;  // (who waits, on whose event)
    std::map<char*, std::size_t> registered;
    std::size_t registrable = SIZE_MAX;
    std::atomic<Result> broken{kSuccess};  // as after a kernel that failed: nothing runs any more
    std::atomic<bool> writes_values{true};
    std::atomic<long> mismatches{0};
    CUctx_st context;
    CUmod_st module;
    std::set<CUfunc_st*> functions;
    std::set<CUevent_st*> events;
    CUstream_st* legacy = nullptr;
};

World& world() {
    static auto* const made = new World;
    return *made;
}

thread_local std::vector<CUctx_st*> contexts;

// The first thing in every function: what a test wants to go wrong, and what a device that has failed answers.
Result enter(const char* symbol, bool needs_context = true) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    ++w.calls[symbol];
    const auto found = w.failures.find(symbol);
    if (found != w.failures.end() && found->second.first-- == 0) {
        const Result result = found->second.second;
        w.failures.erase(found);
        return result;
    }
    if (needs_context && (contexts.empty() || contexts.back() == nullptr)) return kInvalidContext;
    return w.broken.load();
}

bool is_event(CUevent_st* event) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    return w.events.count(event) != 0;
}

#define ENTER(symbol) \
    if (const Result result = enter(symbol); result != kSuccess) return result

double draw_delay() {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    if (w.longest_delay <= 0) return 0;
    std::uniform_real_distribution<double> uniform(0, 1);
    return uniform(w.random) < 0.5 ? 0 : uniform(w.random) * w.longest_delay;
}

CUstream_st* stream_of(CUstream_st* stream) {
    if (stream != nullptr) return stream;
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    if (w.legacy == nullptr) w.legacy = new CUstream_st;
    return w.legacy;
}

// Whether the memory lies within one registration; `any`: whether it touches one at all.
bool in_registration(const void* memory, std::size_t bytes, bool* any) {
    World& w = world();
    const auto* const first = static_cast<const char*>(memory);
    const std::lock_guard<std::mutex> lock(w.mutex);
    *any = false;
    for (const auto& [start, length] : w.registered) {
        if (first >= start && first + bytes <= start + length) return true;
        if (first < start + length && start < first + bytes) *any = true;
    }
    return false;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

using Emulate = void (*)(const char*, unsigned, unsigned, void**);

Emulate emulated_kernels() {
    static const Emulate found = [] {
        const char* const library = std::getenv("FAKE_CUDA_KERNELS");
        if (library == nullptr) return Emulate{nullptr};
        void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            std::fprintf(stderr, "FAKE_CUDA_KERNELS: %s\n", dlerror());
            std::abort();
        }
        return reinterpret_cast<Emulate>(dlsym(handle, "emulate_launch"));
    }();
    return found;
}

float load(const std::string& type, const void* memory, std::uint64_t i) {
    if (type == "bf16") return ScalarLanes::load_bf16(static_cast<const std::uint16_t*>(memory) + i);
    if (type == "f16") return ScalarLanes::load_f16(static_cast<const std::uint16_t*>(memory) + i);
    return static_cast<const float*>(memory)[i];
}

// A value of the type it has already keeps its bits, NaN payloads included.
void convert(const std::string& from, const std::string& to, const void* source, std::uint64_t s, void* target,
             std::uint64_t t) {
    if (from == to) {
        const std::size_t size = from == "f32" ? 4 : 2;
        std::memcpy(static_cast<char*>(target) + size * t, static_cast<const char*>(source) + size * s, size);
        return;
    }
    const float x = load(from, source, s);
    if (to == "bf16")
        return ScalarLanes::store_bf16(static_cast<std::uint16_t*>(target) + t, ScalarLanes::canonical(x));
    if (to == "f16") return ScalarLanes::store_f16(static_cast<std::uint16_t*>(target) + t, x);
    static_cast<float*>(target)[t] = x;
}

double sum_of_block(const std::string& type, const void* gradient, std::uint64_t begin, std::uint64_t end) {
    double s[16] = {};
    for (std::uint64_t i = begin; i < end; ++i) {
        const double x = load(type, gradient, i);
        s[(i - begin) % 16] += x * x;
    }
    for (int half = 8; half >= 1; half /= 2) {
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    }
    return s[0] - s[0] == 0 ? s[0] : __builtin_inf();
}

void run_kernel(const std::string& name, unsigned grid, unsigned block, void** arguments) {
    if (const Emulate emulate = emulated_kernels()) {
        emulate(name.c_str(), grid, block, arguments);
        return;
    }
    const std::size_t first = name.find('_');
    const std::size_t second = name.find('_', first + 1);
    const std::string from = name.substr(first + 1, second - first - 1);
    const std::string to = name.substr(second + 1);
    const auto* const pieces = *static_cast<const CopyPiece**>(arguments[0]);
    const unsigned count = *static_cast<unsigned*>(arguments[1]);
    void* const buffer = *static_cast<void**>(arguments[2]);
    constexpr std::uint64_t kBlock = superoffload::adam::kBlock;
    for (unsigned p = 0; p < count; ++p) {
        const CopyPiece& piece = pieces[p];
        auto* const there = reinterpret_cast<void*>(piece.address);
        for (std::uint64_t i = 0; i < piece.numel; ++i) {
            if (name.rfind("pack", 0) == 0) {
                convert(from, to, there, i, buffer, piece.offset + i);
            } else {
                convert(from, to, buffer, piece.offset + i, there, i);
            }
        }
        if (name.rfind("pack", 0) != 0) continue;
        auto* const sums = *static_cast<double**>(arguments[3]);
        for (std::uint64_t b = 0; b * kBlock < piece.numel; ++b) {
            const std::uint64_t end = std::min<std::uint64_t>(piece.numel, (b + 1) * kBlock);
            sums[piece.first_block + b] = sum_of_block(from, there, b * kBlock, end);
        }
    }
}

}  // namespace

void CUstream_st::enqueue(std::function<void()> operation, bool always) {
    const double delay = draw_delay();
    {
        const std::lock_guard<std::mutex> lock(mutex);
        queue.push_back({delay, always, std::move(operation)});
    }
    changed.notify_all();
}

void CUstream_st::run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [this] { return !queue.empty(); });
        const Operation operation = queue.front();
        lock.unlock();
        if (operation.delay > 0) std::this_thread::sleep_for(std::chrono::duration<double>(operation.delay));
        if (operation.always || world().broken.load() == kSuccess) operation.run();
        lock.lock();
        queue.pop_front();
        changed.notify_all();
    }
}

// ---- the driver -----------------------------------------------------------------------------------------------------

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
    return found == names.end() ? kInvalidValue : kSuccess;
}

EXPORT Result cuGetErrorString(Result, const char** text) {
    *text = "as the fake driver was told";
    return kSuccess;
}

EXPORT Result cuDeviceGet(int* device, int ordinal) {
    if (const Result result = enter("cuDeviceGet", false); result != kSuccess) return result;
    *device = ordinal;
    return ordinal == 0 ? kSuccess : kInvalidValue;
}

EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == superoffload::cuda::kComputeCapabilityMajor ? 9 : 0;
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
    if (contexts.empty()) contexts.push_back(nullptr);
    contexts.back() = context;
    return kSuccess;
}

EXPORT Result cuCtxPushCurrent_v2(CUctx_st* context) {
    if (context != &world().context) return kInvalidContext;
    contexts.push_back(context);
    return kSuccess;
}

EXPORT Result cuCtxPopCurrent_v2(CUctx_st** context) {
    if (contexts.empty()) return kInvalidContext;
    *context = contexts.back();
    contexts.pop_back();
    return kSuccess;
}

EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) {
    *mode = 0;
    return kSuccess;
}

EXPORT Result cuStreamCreate(CUstream_st** stream, unsigned flags) {
    ENTER("cuStreamCreate");
    if (flags > 1) return kInvalidValue;
    *stream = new CUstream_st;
    return kSuccess;
}

EXPORT Result cuStreamDestroy_v2(CUstream_st*) { return enter("cuStreamDestroy_v2"); }

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
    if (contexts.empty() || contexts.back() == nullptr) return kInvalidContext;
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    return w.registered.erase(static_cast<char*>(memory)) == 1 ? kSuccess : kNotRegistered;
}

EXPORT Result cuMemHostGetDevicePointer_v2(DeviceAddress* address, void* memory, unsigned flags) {
    ENTER("cuMemHostGetDevicePointer_v2");
    if (flags != 0) return kInvalidValue;
    bool any = false;
    if (!in_registration(memory, 1, &any)) return kNotRegistered;
    *address = reinterpret_cast<DeviceAddress>(memory);
    return kSuccess;
}

// With ordinary host memory a real driver returns from a copy down once it is made, and from one up once the host
// memory may be written again.
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

// As csrc/cuda/kernels.cu defines them.
static const std::set<std::string>& kernel_names() {
    static const std::set<std::string> names = [] {
        std::set<std::string> made;
        for (const char* same : {"f32_f32", "bf16_bf16", "f16_f16"}) {
            for (const char* kind : {"pack_", "unpack_", "step_"}) made.insert(std::string(kind) + same);
        }
        for (const char* type : {"bf16", "f16"}) {
            made.insert(std::string("pack_") + type + "_f32");
            made.insert(std::string("unpack_f32_") + type);
            made.insert(std::string("step_f32_") + type);
        }
        for (const std::string& name : std::set<std::string>(made)) {
            if (name.rfind("step_", 0) == 0) made.insert(name + "_noisy");
        }
        return made;
    }();
    return names;
}

EXPORT Result cuModuleGetFunction(CUfunc_st** function, CUmod_st*, const char* name) {
    ENTER("cuModuleGetFunction");
    if (kernel_names().count(name) == 0) return kNotFound;
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    *function = new CUfunc_st{name};
    w.functions.insert(*function);
    return kSuccess;
}

// The second parameter of every kernel is an unsigned, the others are pointers: pack has five, unpack three, step two.
EXPORT Result cuLaunchKernel(CUfunc_st* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned,
                             unsigned, CUstream_st* stream, void** parameters, void**) {
    ENTER("cuLaunchKernel");
    if (grid == 0 || grid > 0x7fffffffu || block == 0 || block > 1024) return kInvalidValue;
    {
        World& w = world();
        const std::lock_guard<std::mutex> lock(w.mutex);
        if (w.functions.count(function) == 0) return kInvalidHandle;
    }
    const std::string name = function->name;
    const std::size_t count = name[0] == 'p' ? 5 : name[0] == 'u' ? 3 : 2;
    std::vector<std::uint64_t> values(count, 0);
    for (std::size_t i = 0; i < count; ++i) std::memcpy(&values[i], parameters[i], i == 1 ? 4 : 8);
    stream_of(stream)->enqueue([name, grid, block, values]() mutable {
        std::vector<void*> pointers;
        for (std::uint64_t& value : values) pointers.push_back(&value);
        run_kernel(name, grid, block, pointers.data());
    });
    return kSuccess;
}

// ---- for tests ------------------------------------------------------------------------------------------------------

// Every operation on a stream is delayed by up to so many microseconds, from this seed on.
EXPORT void fake_cuda_delays(std::uint64_t seed, double microseconds) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.random.seed(seed);
    w.longest_delay = 1e-6 * microseconds;
}

// A device as new: no delays, no errors. Memory and streams stay.
EXPORT void fake_cuda_reset() {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.longest_delay = 0;
    w.failures.clear();
    w.calls.clear();
    w.dropped.clear();
    w.registrable = SIZE_MAX;
    w.broken.store(kSuccess);
    w.writes_values.store(true);
    w.mismatches.store(0);
}

// The call of `symbol` after `calls` more of them returns `result`.
EXPORT void fake_cuda_fail(const char* symbol, int calls, Result result) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.failures[symbol] = {calls, result};
}

// As after a kernel that failed: what is enqueued never runs, and every call returns `result`.
EXPORT void fake_cuda_break(Result result) { world().broken.store(result); }

EXPORT void fake_cuda_write_values(int supported) { world().writes_values.store(supported != 0); }

EXPORT void fake_cuda_registrable(std::size_t bytes) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.registrable = bytes;
}

// Waits of `later` for events recorded on `earlier` are left out: the mistake that tests must notice.
EXPORT void fake_cuda_drop_waits(CUstream_st* later, CUstream_st* earlier) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.dropped.insert({later, earlier});
}

EXPORT CUstream_st* fake_cuda_stream() { return new CUstream_st; }
EXPORT void fake_cuda_synchronize(CUstream_st* stream) { stream_of(stream)->synchronize(); }

// Work of a model on a stream: writes `source`, a copy of which is made now, to `target`.
EXPORT void fake_cuda_write(CUstream_st* stream, void* target, const void* source, std::size_t bytes) {
    const auto* const first = static_cast<const char*>(source);
    std::vector<char> copy(first, first + bytes);
    stream_of(stream)->enqueue([target, copy] { std::memcpy(target, copy.data(), copy.size()); });
}

// Likewise, reads `memory`, which must then hold what it holds now.
EXPORT void fake_cuda_read(CUstream_st* stream, const void* memory, std::size_t bytes) {
    const auto* const first = static_cast<const char*>(memory);
    std::vector<char> expected(first, first + bytes);
    stream_of(stream)->enqueue([memory, expected] {
        if (std::memcmp(memory, expected.data(), expected.size()) != 0) ++world().mismatches;
    });
}

EXPORT void fake_cuda_sleep(CUstream_st* stream, double microseconds) {
    stream_of(stream)->enqueue(
        [microseconds] { std::this_thread::sleep_for(std::chrono::duration<double>(1e-6 * microseconds)); });
}

EXPORT long fake_cuda_mismatches() { return world().mismatches.load(); }

EXPORT long fake_cuda_calls(const char* symbol) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    return w.calls[symbol];
}

EXPORT std::size_t fake_cuda_registered_bytes() {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    std::size_t bytes = 0;
    for (const auto& [start, length] : w.registered) bytes += length;
    return bytes;
}
