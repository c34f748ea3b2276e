// Records, as a preloaded library, every call that a program makes to the disk below one folder, whichever Python
// function makes it. One call can fail, be cut short or be the last. The record lists the changes of the disk
// (tests/support/disk_faults.py). Syncs only go into the record: it shows what a power cut leaves, and the tests stay
// fast.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kKill = -1;   // the process ends instead of the call
constexpr int kTear = -2;   // a write writes half, and the process ends
constexpr int kShort = -3;  // a write writes half
constexpr int kKilled = 77;

struct World {
    std::mutex mutex;
    std::string root;
    std::string record;
    long calls = 0, at = 0;
    int fault = 0;
    bool lasting = false, counting = false;
};
World& world() {
    static World* const one = new World;  // never destroyed: threads may write until the end
    return *one;
}

std::string name_of(int handle) {
    char link[64], path[PATH_MAX];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    const ssize_t length = readlink(link, path, sizeof path);
    return length < 0 ? "" : std::string(path, static_cast<size_t>(length));
}
std::string name_of(int folder, const char* path) {
    return path[0] == '/' || folder == AT_FDCWD ? path : name_of(folder) + "/" + path;
}

// Tells whether the call is below the root; `fault` gets the fault of this call, 0 for none.
bool seen(const char* call, const std::string& path, bool needs_space, int* fault) {
    World& w = world();
    *fault = 0;
    if (!w.counting || path.compare(0, w.root.size(), w.root) != 0) return false;
    const std::lock_guard<std::mutex> lock(w.mutex);
    const long number = ++w.calls;
    w.record += "call\t" + std::string(call) + "\t" + path + (needs_space ? "\tspace\n" : "\t\n");
    if (number == w.at || (w.lasting && needs_space && number > w.at)) *fault = w.fault;
    if (*fault == kKill) _exit(kKilled);
    return true;
}
void note(const std::string& line) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().record += line + "\n";
}
std::string hex(const void* data, size_t size) {
    static const char* const kDigits = "0123456789abcdef";
    std::string text;
    for (size_t i = 0; i < size; ++i) {
        const unsigned char byte = static_cast<const unsigned char*>(data)[i];
        text += {kDigits[byte >> 4], kDigits[byte & 15]};
    }
    return text;
}

// Makes the call, or fails it. `changed`: the call's change of the disk, empty for none.
template <class Real, class... Args>
auto made(const char* call, const std::string& path, bool needs_space, const std::string& changed, Real real,
          Args... args) -> decltype(real(args...)) {
    int fault;
    const bool ours = seen(call, path, needs_space, &fault);
    if (fault > 0) {
        errno = fault;
        return -1;
    }
    const auto result = real(args...);
    if (ours && result >= 0 && !changed.empty()) note(changed);
    return result;
}
template <class Real, class... Place>
ssize_t written(int handle, const void* data, size_t size, long at, Real real, Place... place) {
    const std::string path = name_of(handle);
    int fault;
    const bool ours = seen("write", path, true, &fault);
    if (fault > 0) {
        errno = fault;
        return -1;
    }
    if (fault < 0 && size > 1) size /= 2;
    const ssize_t result = real(handle, data, size, place...);
    if (fault == kTear) _exit(kKilled);
    if (ours && result > 0) {
        note("write\t" + path + "\t" + std::to_string(at) + "\t" + hex(data, static_cast<size_t>(result)));
    }
    return result;
}

template <class Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

EXPORT void disk_begin(const char* root, long at, int fault, int lasting) {
    World& w = world();
    w.root = root, w.record.clear(), w.calls = 0, w.at = at, w.fault = fault, w.lasting = lasting != 0;
    w.counting = true;
}
EXPORT long disk_end() {
    world().counting = false;
    return world().calls;
}
EXPORT const char* disk_record() { return world().record.c_str(); }

// Defines both names of a function where the C library has two; Python calls one of them, depending on its build.
#define BOTH(DEFINE, NAME) DEFINE(NAME) DEFINE(NAME##64)
#define OPEN(NAME)                                                                                                \
    EXPORT int NAME(const char* path, int flags, ...) {                                                           \
        va_list more;                                                                                             \
        va_start(more, flags);                                                                                    \
        const mode_t mode = va_arg(more, mode_t);                                                                 \
        va_end(more);                                                                                             \
        static const auto real = next<int(const char*, int, ...)>(#NAME);                                         \
        const bool is_new = (flags & O_CREAT) != 0 && access(path, F_OK) != 0;                                    \
        return made("open", path, is_new, is_new ? std::string("create\t") + path : "", real, path, flags, mode); \
    }
BOTH(OPEN, open)
#define OPENAT(NAME) /* of folders, while they are removed */                                \
    EXPORT int NAME(int folder, const char* path, int flags, ...) {                          \
        static const auto real = next<int(int, const char*, int, ...)>(#NAME);               \
        return made("open", name_of(folder, path), false, "", real, folder, path, flags, 0); \
    }
BOTH(OPENAT, openat)
EXPORT DIR* opendir(const char* path) {
    static const auto real = next<DIR*(const char*)>("opendir");
    return made("list", path, false, "", [](const char*) { return 0; }, path) < 0 ? nullptr : real(path);
}
#define STAT(NAME)                                                              \
    EXPORT int NAME(const char* path, struct stat64* found) {                   \
        static const auto real = next<int(const char*, struct stat64*)>(#NAME); \
        return made("stat", path, false, "", real, path, found);                \
    }
STAT(stat64)
STAT(lstat64)
#define FSTAT(NAME)                                                       \
    EXPORT int NAME(int handle, struct stat64* found) {                   \
        static const auto real = next<int(int, struct stat64*)>(#NAME);   \
        const std::string path = world().counting ? name_of(handle) : ""; \
        return made("fstat", path, false, "", real, handle, found);       \
    }
FSTAT(fstat64)
EXPORT ssize_t read(int handle, void* data, size_t size) {
    static const auto real = next<ssize_t(int, void*, size_t)>("read");
    return made("read", world().counting ? name_of(handle) : "", false, "", real, handle, data, size);
}
EXPORT ssize_t write(int handle, const void* data, size_t size) {
    static const auto real = next<ssize_t(int, const void*, size_t)>("write");
    return written(handle, data, size, lseek(handle, 0, SEEK_CUR), real);
}
#define PWRITE(NAME)                                                                    \
    EXPORT ssize_t NAME(int handle, const void* data, size_t size, off_t at) {          \
        static const auto real = next<ssize_t(int, const void*, size_t, off_t)>(#NAME); \
        return written(handle, data, size, at, real, at);                               \
    }
BOTH(PWRITE, pwrite)
#define TRUNCATE(NAME)                                                                                              \
    EXPORT int NAME(int handle, off_t size) {                                                                       \
        static const auto real = next<int(int, off_t)>(#NAME);                                                      \
        const std::string path = name_of(handle);                                                                   \
        return made("truncate", path, true, "truncate\t" + path + "\t" + std::to_string(size), real, handle, size); \
    }
BOTH(TRUNCATE, ftruncate)
EXPORT int fsync(int handle) {
    const std::string path = name_of(handle);
    return made("sync", path, true, "sync\t" + path, [](int) { return 0; }, handle);
}
EXPORT int rename(const char* from, const char* to) {
    static const auto real = next<int(const char*, const char*)>("rename");
    return made("rename", from, true, std::string("rename\t") + from + "\t" + to, real, from, to);
}
EXPORT int mkdir(const char* path, mode_t mode) {
    static const auto real = next<int(const char*, mode_t)>("mkdir");
    return made("mkdir", path, true, std::string("mkdir\t") + path, real, path, mode);
}
EXPORT int rmdir(const char* path) {
    static const auto real = next<int(const char*)>("rmdir");
    return made("remove", path, false, std::string("remove\t") + path, real, path);
}
EXPORT int unlink(const char* path) {
    static const auto real = next<int(const char*)>("unlink");
    return made("remove", path, false, std::string("remove\t") + path, real, path);
}
EXPORT int unlinkat(int folder, const char* path, int flags) {
    static const auto real = next<int(int, const char*, int)>("unlinkat");
    const std::string name = name_of(folder, path);
    return made("remove", name, false, "remove\t" + name, real, folder, path, flags);
}
EXPORT int flock(int handle, int operation) {
    static const auto real = next<int(int, int)>("flock");
    return made("lock", name_of(handle), false, "", real, handle, operation);
}
EXPORT int close(int handle) {  // frees the handle also where it fails, as Linux does
    static const auto real = next<int(int)>("close");
    int fault;
    seen("close", world().counting ? name_of(handle) : "", false, &fault);
    const int result = real(handle);
    if (fault > 0) errno = fault;
    return fault > 0 ? -1 : result;
}
