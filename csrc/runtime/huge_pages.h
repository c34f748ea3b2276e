// Asks for huge pages for large arrays, and gives pages back: kernels walk several arrays at once, more than the TLB
// covers with small pages.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace superoffload {

// Asks for huge pages in the part of an array that fills whole ones, best before its memory is first touched. This is a
// hint: nothing changes where the system has none, or has larger base pages (then huge ones are hundreds of MiB).
inline void prefer_huge_pages(void* array, std::size_t bytes) {
#ifdef __linux__
    constexpr std::uintptr_t kHugePage = std::uintptr_t{1} << 21;
    if (sysconf(_SC_PAGESIZE) != 4096) return;
    const auto start = reinterpret_cast<std::uintptr_t>(array);
    const std::uintptr_t first = (start + kHugePage - 1) & ~(kHugePage - 1);
    const std::uintptr_t last = (start + bytes) & ~(kHugePage - 1);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)array;
    (void)bytes;
#endif
}

// Gives the whole pages of an array's part back to the system; read again, they are zero.
inline void give_back_pages(void* array, std::size_t bytes) {
#ifdef __linux__
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<std::uintptr_t>(array);
    const std::uintptr_t first = (start + page - 1) & ~(page - 1);
    const std::uintptr_t last = (start + bytes) & ~(page - 1);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
    (void)array;
    (void)bytes;
#endif
}

}  // namespace superoffload
