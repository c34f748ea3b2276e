#include "pinned.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include "../runtime/huge_pages.h"

namespace superoffload::cuda {
namespace {

#ifdef __linux__
constexpr int kPreferred = 1;  // MPOL_PREFERRED
constexpr int kBind = 2;       // MPOL_BIND
constexpr unsigned kNodes = 1024;
#endif

std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

PinnedMemory::PinnedMemory(std::shared_ptr<Gpu> gpu, const PinnedRequest& request)
    : gpu_(std::move(gpu)), request_(request), creator_(static_cast<long>(getpid())) {
    const std::size_t page = page_size();
    request_.chunk = std::max(page, request_.chunk / page * page);
    mapped_ = (std::max<std::size_t>(request_.bytes, 1) + page - 1) / page * page;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = memory;
    try {
        place();
        touch();
        pin();
    } catch (...) {  // the destructor will not run
        munmap(data_, mapped_);
        throw;
    }
}

PinnedMemory::~PinnedMemory() {
    // A forked child does not have it mapped.
    if (creator_ != static_cast<long>(getpid()) || leaked_) return;
    unpin();
    munmap(data_, mapped_);
}

// Places the memory by hints only: memory in another place is slower, not wrong.
void PinnedMemory::place() {
#ifdef __linux__
    madvise(data_, mapped_, MADV_DONTFORK);  // a child must not copy on write what a device writes to
    if (request_.node >= 0 && static_cast<unsigned>(request_.node) < kNodes) {
        constexpr unsigned kBits = 8 * sizeof(unsigned long);
        unsigned long mask[kNodes / kBits] = {};
        mask[static_cast<unsigned>(request_.node) / kBits] = 1UL << (static_cast<unsigned>(request_.node) % kBits);
        syscall(SYS_mbind, data_, mapped_, request_.strict ? kBind : kPreferred, mask, kNodes + 1, 0);
    }
#endif
    prefer_huge_pages(data_, mapped_);
}

void PinnedMemory::touch() {
    const std::size_t page = page_size();
    const std::size_t share = (mapped_ / std::max(1u, request_.threads) + page) / page * page;
    const auto write = [this, page](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; i += page) static_cast<volatile char*>(data_)[i] = 0;
    };
    std::vector<std::thread> threads;
    std::size_t left = share;
    try {
        for (; left < mapped_; left += share) threads.emplace_back(write, left, std::min(mapped_, left + share));
    } catch (const std::system_error&) {  // the system has no more threads
        write(left, mapped_);
    }
    write(0, std::min(mapped_, share));
    for (std::thread& thread : threads) thread.join();
}

void PinnedMemory::pin() {
    const Gpu::Current here(*gpu_);
    const Driver& driver = gpu_->driver();
    while (registered_ < mapped_) {
        const std::size_t bytes = std::min(request_.chunk, mapped_ - registered_);
        const Result result = driver.host_register(static_cast<char*>(data_) + registered_, bytes,
                                                   kRegisterPortable | kRegisterDeviceMap);
        if (result != kSuccess) {
            refusal_ = driver.describe(result, "cuMemHostRegister of " + std::to_string(bytes) + " bytes");
            unpin();
            return;
        }
        registered_ += bytes;
    }
}

void PinnedMemory::unpin() {
    if (registered_ == 0 || creator_ != static_cast<long>(getpid())) return;
    const Driver& driver = gpu_->driver();
    Context before = nullptr;
    const bool current = gpu_->try_push();
    for (std::size_t start = 0; start < registered_; start += request_.chunk) {
        driver.host_unregister(static_cast<char*>(data_) + start);  // ignores errors: the process or context is ending
    }
    if (current) driver.context_pop(&before);
    registered_ = 0;
}

}  // namespace superoffload::cuda
