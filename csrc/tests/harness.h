// Runs native tests: tests register themselves, a failed expectation is printed and counted, and the last line says how
// many tests passed and failed.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace harness {

struct Test {
    const char* name;
    void (*body)();
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

// The counter is atomic, since threads of a test may count too.
inline std::atomic<int>& failures() {
    static std::atomic<int> count{0};
    return count;
}

struct Registration {
    Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

// Returns `ok`, so that a test can stop after its first failure instead of printing thousands.
inline bool expect(bool ok, const char* expression, const std::string& where, const char* file, int line) {
    if (!ok) {
        ++failures();
        std::printf("%s:%d: expected %s%s%s\n", file, line, expression, where.empty() ? "" : " for ", where.c_str());
    }
    return ok;
}

// Runs the tests whose name contains `filter`; the process exits with the result.
inline int run_all(const char* filter) {
    int passed = 0;
    int failed = 0;
    for (const Test& test : tests()) {
        if (filter != nullptr && std::strstr(test.name, filter) == nullptr) continue;
        failures() = 0;
        test.body();
        std::printf("%s %s\n", failures() == 0 ? "ok    " : "FAILED", test.name);
        std::fflush(stdout);
        (failures() == 0 ? passed : failed) += 1;
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace harness

#define TEST(name)                                                       \
    static void name();                                                  \
    static const harness::Registration registration_##name(#name, name); \
    static void name()

#define EXPECT(condition) EXPECT_FOR(condition, "")
// Describes the present case in the failure.
#define EXPECT_FOR(condition, where) harness::expect((condition), #condition, (where), __FILE__, __LINE__)
