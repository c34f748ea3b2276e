// Holds a bucket for tests of the worker pool, a copy to compare with, and helpers for such tests.
#pragma once

#include <memory>
#include <vector>

#include "bucket.h"
#include "harness.h"
#include "runtime/worker_pool.h"

namespace harness {

using superoffload::BucketWork;
using superoffload::Completion;
using superoffload::Operation;
using superoffload::WorkerPool;

constexpr std::size_t kSeveralChunks = 2 * superoffload::kChunk + 777;
constexpr double kLong = 120;  // seconds: a wait that lasts this long is a hang

inline std::vector<int> unbound(std::size_t threads) { return std::vector<int>(threads, -1); }

// Holds a bucket of several runs with its work, and a copy to compare with.
struct Subject {
    explicit Subject(std::vector<std::size_t> sizes, std::uint64_t seed = 3, bool room_for_escapes = true,
                     const std::shared_ptr<superoffload::JournalMemory>& shared = nullptr) {
        std::uint64_t padded = 0;
        std::uint64_t arena = 0;
        for (const std::size_t numel : sizes) {
            Case c;
            c.numel = numel;
            c.seed = seed;
            c.contents = room_for_escapes ? Contents::trained : Contents::hostile;
            runs.push_back(std::make_unique<Bucket>(c));
            twins.push_back(std::make_unique<Bucket>(c));
            padded += numel + 64;
            arena += 4 * full_arena(numel);
        }
        std::vector<superoffload::RunOfShard> described;
        for (const auto& run : runs) described.push_back({run->run({}), 0});
        const std::uint64_t own = padded + (room_for_escapes ? padded + arena : 0);
        work = std::make_shared<BucketWork>(described,
                                            shared ? shared : std::make_shared<superoffload::JournalMemory>(own, own));
    }

    void freeze(std::uint64_t step, double gradient_factor = 1) {
        hyper.gradient_factor = gradient_factor;
        hyper.step = step;
        work->freeze(hyper, std::vector<std::uint64_t>(runs.size(), step));
    }
    // Runs the same operation on the copy, in one piece.
    void step_twin(std::uint64_t step, double gradient_factor = 1) {
        hyper.gradient_factor = gradient_factor;
        hyper.step = step;
        for (const auto& twin : twins) adam::step(twin->run(adam::freeze(hyper)), twin->all());
    }
    bool same() const {
        for (std::size_t i = 0; i < runs.size(); ++i) {
            if (runs[i]->state() != twins[i]->state()) return false;
        }
        return true;
    }
    bool same_shadow() const {
        for (std::size_t i = 0; i < runs.size(); ++i) {
            if (runs[i]->shadow() != twins[i]->shadow()) return false;
        }
        return true;
    }

    adam::Hyper hyper{1e-3, 0.9, 0.999, 1e-8, 1e-2, 1, 1.0, false};
    std::vector<std::unique_ptr<Bucket>> runs, twins;
    std::shared_ptr<BucketWork> work;
};

inline bool succeeds(const std::shared_ptr<Completion>& done) {
    return EXPECT(done->wait(kLong)) && EXPECT_FOR(done->error().empty(), done->error());
}

inline bool does(WorkerPool& pool, const Subject& subject, Operation operation, int width = 1) {
    return succeeds(pool.submit(subject.work, operation, width, nullptr));
}

template <typename Error, typename F>
bool throws(F f) {
    try {
        f();
    } catch (const Error&) {
        return true;
    }
    return false;
}

}  // namespace harness
