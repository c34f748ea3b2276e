#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

namespace superoffload::cuda {
namespace {

// Tells what a user can do about an error; the default covers faults of ours or of the machine.
const char* advice(Result result) {
    switch (result) {
        case kOutOfMemory:
            return "the device is out of memory: use a smaller batch or model, or a smaller bucket_numel";
        case kDeinitialized:
            return "the process is ending: call close() on the optimizer before it does";
        case 214:  // ECC_UNCORRECTABLE
        case 700:  // ILLEGAL_ADDRESS
        case 702:  // LAUNCH_TIMEOUT
        case 710:  // ASSERT
        case 714:  // HARDWARE_STACK_ERROR
        case 715:  // ILLEGAL_INSTRUCTION
        case 716:  // MISALIGNED_ADDRESS
        case 717:  // INVALID_ADDRESS_SPACE
        case 718:  // INVALID_PC
        case 719:  // LAUNCH_FAILED
            return "a kernel has failed on this device, perhaps one of the model, and nothing runs there any more. "
                   "Masters and moments are in host memory and those of the last finished step: save state_dict(), "
                   "then find the kernel with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer in a new process";
        case 900:
        case 901:
        case 906:
            return "gradients cannot be packed while a CUDA graph is captured: run backward and step() outside of it, "
                   "or give the model to torch.cuda.make_graphed_callables() before the optimizer is made";
        default:
            return "masters and moments are those of the last finished step: save state_dict() and restart; if it "
                   "happens again, report it with `superoffload doctor`'s output";
    }
}

}  // namespace

std::shared_ptr<Driver> Driver::load(const std::string& library) {
    return std::shared_ptr<Driver>(new Driver(library));
}

Driver::Driver(const std::string& library) {
    // The library is never closed: its own threads outlive us.
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* error = dlerror();
        throw DriverError(kNotFound, "the CUDA driver cannot be loaded (" + std::string(error ? error : library) +
                                         "); install the NVIDIA driver, or train on the CPU");
    }
#define SUPEROFFLOAD_FIND(name, symbol, parameters)                                                              \
    name = reinterpret_cast<decltype(name)>(dlsym(handle, #symbol));                                             \
    if (name == nullptr) {                                                                                       \
        throw DriverError(kNotFound, library + " has no " #symbol "; the driver is too old: CUDA 12 is needed"); \
    }
    SUPEROFFLOAD_DRIVER_FUNCTIONS(SUPEROFFLOAD_FIND)
#undef SUPEROFFLOAD_FIND
    check(init(0), "cuInit");
}

std::string Driver::describe(Result result, const std::string& what) const {
    const char* name = nullptr;
    const char* text = nullptr;
    if (get_error_name(result, &name) != kSuccess || name == nullptr) name = "an unknown error";
    if (get_error_string(result, &text) != kSuccess || text == nullptr) text = "no description";
    return "CUDA: " + what + ": " + name + " (" + std::to_string(result) + ", " + text + "); " + advice(result);
}

void Driver::check(Result result, const char* what) const {
    if (result != kSuccess) throw DriverError(result, describe(result, what));
}

Gpu::Gpu(std::shared_ptr<Driver> driver, int ordinal)
    : driver_(std::move(driver)), creator_(static_cast<long>(getpid())) {
    driver_->check(driver_->device_get(&device_, ordinal), "cuDeviceGet");
    driver_->check(driver_->primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

Gpu::~Gpu() {
    if (creator_ == static_cast<long>(getpid())) driver_->primary_context_release(device_);
}

void Gpu::adopt_thread() const {
    driver_->check(driver_->context_set(context_), "cuCtxSetCurrent");
    int mode = kCaptureModeRelaxed;
    driver_->check(driver_->exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
}

std::string Gpu::pci_bus_id() const {
    char text[32] = {};
    driver_->check(driver_->device_get_pci_bus_id(text, sizeof text - 1, device_), "cuDeviceGetPCIBusId");
    return text;
}

Gpu::Current::Current(const Gpu& gpu) : driver_(gpu.driver()) {
    driver_.check(driver_.context_push(gpu.context_), "cuCtxPushCurrent");
}

Gpu::Current::~Current() {
    Context before = nullptr;
    driver_.context_pop(&before);
}

}  // namespace superoffload::cuda
