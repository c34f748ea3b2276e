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

#ifdef __linux__
// Advises the system on the part of an array that fills whole pages of `page` bytes.
inline void advise(void* array, std::size_t bytes, std::uintptr_t page, int advice) {
    const auto start = reinterpret_cast<std::uintptr_t>(array);
    const std::uintptr_t first = (start + page - 1) & ~(page - 1);
    const std::uintptr_t last = (start + bytes) & ~(page - 1);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, advice);
}
#endif

// Asks for huge pages in the part of an array that fills whole ones, best before its memory is first touched. This is a
// hint: nothing changes where the system has none, or has larger base pages (then huge ones are hundreds of MiB).
inline void prefer_huge_pages(void* array, std::size_t bytes) {
#ifdef __linux__
    if (sysconf(_SC_PAGESIZE) == 4096) advise(array, bytes, std::uintptr_t{1} << 21, MADV_HUGEPAGE);
#else
    (void)array;
    (void)bytes;
#endif
}

// Gives the whole pages of an array's part back to the system; read again, they are zero.
inline void give_back_pages(void* array, std::size_t bytes) {
#ifdef __linux__
    advise(array, bytes, static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)), MADV_DONTNEED);
#else
    (void)array;
    (void)bytes;
#endif
}

}  // namespace superoffload
