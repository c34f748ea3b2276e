// Loads the CUDA driver at run time, so that builds need no CUDA headers, and machines without a driver get an error.
// The types are those of its stable binary interface; csrc/tests/check_driver.cpp compares them with cuda.h where that
// is installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace superoffload::cuda {

using Result = int;
using Device = int;
using DeviceAddress = unsigned long long;
using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;

enum : Result {
    kSuccess = 0,
    kOutOfMemory = 2,
    kDeinitialized = 4,
    kNotFound = 500,
    kNotReady = 600,
    kNotSupported = 801,
};
enum : unsigned {
    kEventDisableTiming = 2,
    kRegisterPortable = 1,
    kRegisterDeviceMap = 2,
    kWriteValueDefault = 0,
};
enum : int { kCaptureModeRelaxed = 2 };

// Lists the name in Driver, the symbol in the library and the parameters. Of several versions of a function this is the
// one that cuda.h chooses, by its full name.
#define SUPEROFFLOAD_DRIVER_FUNCTIONS(F)                                                             \
    F(init, cuInit, (unsigned))                                                                      \
    F(get_error_name, cuGetErrorName, (Result, const char**))                                        \
    F(get_error_string, cuGetErrorString, (Result, const char**))                                    \
    F(device_get, cuDeviceGet, (Device*, int))                                                       \
    F(device_get_pci_bus_id, cuDeviceGetPCIBusId, (char*, int, Device))                              \
    F(primary_context_retain, cuDevicePrimaryCtxRetain, (Context*, Device))                          \
    F(primary_context_release, cuDevicePrimaryCtxRelease_v2, (Device))                               \
    F(context_set, cuCtxSetCurrent, (Context))                                                       \
    F(context_push, cuCtxPushCurrent_v2, (Context))                                                  \
    F(context_pop, cuCtxPopCurrent_v2, (Context*))                                                   \
    F(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int*))                              \
    F(stream_query, cuStreamQuery, (Stream))                                                         \
    F(stream_wait_event, cuStreamWaitEvent, (Stream, Event, unsigned))                               \
    F(stream_write_value, cuStreamWriteValue32_v2, (Stream, DeviceAddress, std::uint32_t, unsigned)) \
    F(event_create, cuEventCreate, (Event*, unsigned))                                               \
    F(event_destroy, cuEventDestroy_v2, (Event))                                                     \
    F(event_record, cuEventRecord, (Event, Stream))                                                  \
    F(event_query, cuEventQuery, (Event))                                                            \
    F(host_register, cuMemHostRegister_v2, (void*, std::size_t, unsigned))                           \
    F(host_unregister, cuMemHostUnregister, (void*))                                                 \
    F(host_device_pointer, cuMemHostGetDevicePointer_v2, (DeviceAddress*, void*, unsigned))          \
    F(copy_down, cuMemcpyDtoHAsync_v2, (void*, DeviceAddress, std::size_t, Stream))                  \
    F(copy_up, cuMemcpyHtoDAsync_v2, (DeviceAddress, const void*, std::size_t, Stream))              \
    F(module_load, cuModuleLoadData, (Module*, const void*))                                         \
    F(module_unload, cuModuleUnload, (Module))                                                       \
    F(module_get_function, cuModuleGetFunction, (Function*, Module, const char*))                    \
    F(launch, cuLaunchKernel,                                                                        \
      (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**))

// Reports a driver call that failed. what() names the call, the error, and what to do about it.
class DriverError : public std::runtime_error {
   public:
    DriverError(Result result, const std::string& message) : std::runtime_error(message), result(result) {}
    Result result;
};

class Driver {
   public:
    // Throws DriverError if the library or a function in it is missing, or if it cannot be initialized.
    static std::shared_ptr<Driver> load(const std::string& library);
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

#define SUPEROFFLOAD_DECLARE(name, symbol, parameters) Result(*name) parameters = nullptr;
    SUPEROFFLOAD_DRIVER_FUNCTIONS(SUPEROFFLOAD_DECLARE)
#undef SUPEROFFLOAD_DECLARE

    // Throws DriverError unless the call succeeded. `what`: "the call while what", in words.
    void check(Result result, const char* what) const;
    std::string describe(Result result, const std::string& what) const;

   private:
    explicit Driver(const std::string& library);
};

// Retains the primary context of a device, which torch uses too, during its lifetime.
class Gpu {
   public:
    Gpu(std::shared_ptr<Driver> driver, int ordinal);
    ~Gpu();
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;

    const Driver& driver() const { return *driver_; }
    // Makes the context current on a thread of ours, and keeps the thread's calls from breaking another thread's stream
    // capture.
    void adopt_thread() const;
    std::string pci_bus_id() const;  // "0000:17:00.0"

    // Makes the context current until context_pop; false if the driver is shutting down.
    bool try_push() const { return driver_->context_push(context_) == kSuccess; }

    // Keeps the context current on this thread while it lives.
    class Current {
       public:
        explicit Current(const Gpu& gpu);
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

       private:
        const Driver& driver_;
    };

   private:
    std::shared_ptr<Driver> driver_;
    Device device_ = 0;
    Context context_ = nullptr;
    long creator_;
};

}  // namespace superoffload::cuda
