#include "arrival_flag.h"

namespace superoffload::cuda {

ArrivalFlag::ArrivalFlag(const Gpu& gpu, void* word)
    : word_(static_cast<std::atomic<std::uint32_t>*>(word)), in_use_(word != nullptr) {
    if (word == nullptr) return;
    const Gpu::Current here(gpu);
    word_->store(0);
    gpu.driver().check(gpu.driver().host_device_pointer(&address_, word, 0), "cuMemHostGetDevicePointer of the flag");
}

bool ArrivalFlag::enqueue(const Driver& driver, Stream stream, std::uint32_t sequence) {
    if (!in_use_.load()) return false;
    const Result result = driver.stream_write_value(stream, address_, sequence, kWriteValueDefault);
    if (result == kNotSupported) {
        in_use_.store(false);
        return false;
    }
    driver.check(result, "cuStreamWriteValue32 of the arrival flag");
    return true;
}

}  // namespace superoffload::cuda
