// Tests the threads of the worker pool: they sleep until the thread that ends a bucket's wait wakes them, and no more
// of them wake than there is work for.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "runtime/worker_pool.h"
#include "subject.h"

using namespace harness;

namespace {

std::shared_ptr<Completion> pending() { return std::make_shared<Completion>(); }

TEST(who_is_told_of_a_completion_is_told_once) {
    int told = 0;
    const auto count = [&told] { ++told; };
    Completion finished;
    Completion failed;
    for (Completion* const completion : {&finished, &failed}) {
        told = 0;
        completion->when_done(count);
        completion->when_done(count);
        EXPECT(told == 0);
        completion == &finished ? completion->finish() : completion->fail("planted");
        EXPECT(told == 2);
        completion->finish();
        EXPECT(told == 2);
        completion->when_done(count);
        EXPECT(told == 3);
    }
}

TEST(what_was_submitted_first_goes_first_whatever_arrives_first) {
    WorkerPool pool(unbound(1));
    Subject before({5000});
    Subject early({5000});
    Subject late({5000});
    for (Subject* const subject : {&before, &early, &late}) subject->freeze(1);
    const auto go = pending();
    const auto early_arrived = pending();
    const auto late_arrived = pending();
    const auto done = pool.submit(before.work, Operation::step, 1, go);
    const auto early_done = pool.submit(early.work, Operation::step, 1, early_arrived);
    const auto late_done = pool.submit(late.work, Operation::step, 1, late_arrived);
    done->when_done([&] {  // runs on the only worker
        late_arrived->finish();
        early_arrived->finish();
    });
    go->finish();
    if (!succeeds(early_done) || !succeeds(late_done)) return;
    EXPECT(early_done->ended.load() <= late_done->began.load());
}

TEST(a_completion_may_outlive_its_pool) {
    Subject subject({kSeveralChunks});
    subject.freeze(1);
    const auto arrived = pending();
    std::shared_ptr<Completion> done;
    {
        WorkerPool pool(unbound(2));
        done = pool.submit(subject.work, Operation::step, 1, arrived);
    }
    EXPECT(done->done() && !done->error().empty());
    arrived->finish();
    EXPECT(subject.same());
}

TEST(closing_races_with_arrivals) {
    for (std::uint64_t round = 0; round < 100; ++round) {
        Random random(round);
        Subject first({3000});
        Subject second({3000}, 4);
        const auto first_arrived = pending();
        const auto second_arrived = pending();
        std::shared_ptr<Completion> done[3];
        auto pool = std::make_unique<WorkerPool>(unbound(1 + round % 3));
        for (Subject* const subject : {&first, &second}) subject->freeze(1);
        done[0] = pool->submit(first.work, Operation::publish, 1, first_arrived);
        done[1] = pool->submit(first.work, Operation::settle, 1, done[0]);
        done[2] = pool->submit(second.work, Operation::step, 1, second_arrived);
        second_arrived->finish();  // before the pool is closed, so this one runs
        std::thread link([&, wait = random.below(200)] {
            std::this_thread::sleep_for(std::chrono::microseconds(wait));
            first_arrived->finish();
        });
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(200)));
        pool->close();
        for (const auto& each : done) EXPECT(each->done());  // all of it has ended, one way or the other
        EXPECT(done[2]->error().empty());
        second.step_twin(1);
        EXPECT(second.same());
        const bool ran = done[0]->error().empty();
        if (ran) first.step_twin(1);
        EXPECT(done[1]->error().empty() == ran);  // a task that a worker has made ready is not left behind
        EXPECT(first.same() && (!ran || first.same_shadow()));
        if (round % 2 == 0) pool.reset();
        link.join();
    }
}

// Takes one bucket through some steps, with arrivals that another thread ends.
struct Life {
    explicit Life(std::uint64_t seed)
        : random(seed), subject({1 + random.below(2 * superoffload::kChunk), 100}, seed, random.below(4) != 0) {}

    void submit(WorkerPool& pool, std::uint64_t number) {
        step = number;
        arrived = random.below(6) == 0 ? nullptr : pending();
        subject.freeze(step);
        fate = static_cast<int>(random.below(5));
        const Operation operations[] = {Operation::step, Operation::step_journaled, Operation::step_journaled,
                                        Operation::publish, Operation::step};
        done = pool.submit(subject.work, operations[fate], 1, arrived);
        if (fate == 3) settled = pool.submit(subject.work, Operation::settle, 1, done);
    }
    bool finish(WorkerPool& pool) {
        if (fate == 4 && pool.withdraw(done)) return EXPECT(subject.same());
        if (!done->wait(kLong) || (fate == 3 && !settled->wait(kLong))) return EXPECT(!"a wake-up was lost");
        const bool taken_back = fate == 2 || subject.work->overflowed();
        if (fate == 2 && !subject.work->overflowed() && !does(pool, subject, Operation::undo)) return false;
        const bool journaled = fate == 1 || fate == 2;
        if (!journaled || !taken_back) subject.step_twin(step);
        return EXPECT(subject.same());
    }

    Random random;
    Subject subject;
    std::uint64_t step = 0;
    int fate = 0;
    std::shared_ptr<Completion> arrived, done, settled;
};

TEST(random_schedules_lose_no_wake_up) {
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
        Random random(seed);
        WorkerPool pool(unbound(1 + seed % 6));
        std::vector<std::unique_ptr<Life>> lives;
        for (std::uint64_t i = 0; i < 6; ++i) lives.push_back(std::make_unique<Life>(100 * seed + i));
        for (std::uint64_t step = 1; step <= 8; ++step) {
            std::vector<std::shared_ptr<Completion>> arrivals;
            for (const auto& life : lives) {
                life->submit(pool, step);
                if (life->arrived) arrivals.push_back(life->arrived);
            }
            for (std::size_t i = arrivals.size(); i > 1; --i) std::swap(arrivals[i - 1], arrivals[random.below(i)]);
            std::thread link([&arrivals, &random] {
                for (const auto& each : arrivals) {
                    if (random.below(2) == 0) std::this_thread::sleep_for(std::chrono::microseconds(random.below(150)));
                    each->finish();
                }
            });
            bool well = true;
            for (const auto& life : lives) well = life->finish(pool) && well;
            link.join();
            if (!EXPECT_FOR(well, "seed " + std::to_string(seed))) return;
        }
    }
}

#if defined(__linux__)
// Reads one line of /proc/self/task/*/status, for example the name or the processors of a thread.
std::string status_line(const std::filesystem::path& task, const std::string& key) {
    std::ifstream status(task / "status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind(key + ":\t", 0) == 0) return line.substr(key.size() + 2);
    }
    return {};
}

std::map<std::string, std::string> processors_by_thread_name() {
    std::map<std::string, std::string> found;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        found[status_line(task.path(), "Name")] = status_line(task.path(), "Cpus_allowed_list");
    }
    return found;
}

TEST(threads_have_names_and_stay_on_their_processor) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    EXPECT(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    int last = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &allowed)) last = cpu;
    }
    const std::string everything = status_line("/proc/self", "Cpus_allowed_list");
    WorkerPool pool({last, -1, 1000});  // one bound, one free, one to a processor that does not exist
    Subject subject({kSeveralChunks});
    subject.freeze(1);
    does(pool, subject, Operation::step);
    subject.step_twin(1);
    EXPECT(subject.same());
    const std::map<std::string, std::string> expected = {
        {"superoffload-0", std::to_string(last)}, {"superoffload-1", everything}, {"superoffload-2", everything}};
    bool as_expected = false;  // a thread names and binds itself after it has started
    for (int attempt = 0; attempt < 2000 && !as_expected; ++attempt) {
        const std::map<std::string, std::string> found = processors_by_thread_name();
        as_expected = std::includes(found.begin(), found.end(), expected.begin(), expected.end());
        if (!as_expected) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT(as_expected);
}

// Counts how often each worker has gone to sleep so far, by its name.
std::map<std::string, long> sleeps() {
    std::map<std::string, long> found;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        const std::string name = status_line(task.path(), "Name");
        if (name.rfind("superoffload-", 0) == 0) {
            found[name] = std::stol(status_line(task.path(), "voluntary_ctxt_switches"));
        }
    }
    return found;
}

// Counts once nothing changes any more.
std::map<std::string, long> sleeps_at_rest(std::size_t threads) {
    std::map<std::string, long> last;
    for (int attempt = 0; attempt < 500; ++attempt) {
        std::map<std::string, long> now = sleeps();
        if (now.size() == threads && now == last) return now;
        last = std::move(now);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT(!"the workers come to rest");
    return last;
}

std::size_t woken(const std::map<std::string, long>& before, const std::map<std::string, long>& after) {
    return static_cast<std::size_t>(std::count_if(
        after.begin(), after.end(), [&](const auto& entry) { return before.at(entry.first) != entry.second; }));
}

TEST(waiting_costs_no_processor) {
    constexpr std::size_t threads = 6;
    WorkerPool pool(unbound(threads));
    Subject subject({kSeveralChunks});
    subject.freeze(1);
    const auto arrived = pending();
    const auto done = pool.submit(subject.work, Operation::step, 1, arrived);
    const std::map<std::string, long> before = sleeps_at_rest(threads);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT(sleeps() == before);  // no worker has polled for the arrival
    arrived->finish();
    succeeds(done);
    subject.step_twin(1);
    EXPECT(subject.same());
}

TEST(no_more_threads_wake_than_have_work) {
    constexpr std::size_t threads = 12;
    WorkerPool pool(unbound(threads));
    Subject subject({2000});  // one chunk
    for (std::uint64_t step = 1; step <= 5; ++step) {
        subject.freeze(step);
        const auto arrived = pending();
        const auto done = pool.submit(subject.work, Operation::step, 1, arrived);
        const std::map<std::string, long> before = sleeps_at_rest(threads);
        arrived->finish();
        succeeds(done);
        EXPECT(woken(before, sleeps_at_rest(threads)) == 1);
    }
}

TEST(a_large_bucket_wakes_all_threads) {
    constexpr std::size_t threads = 7;
    WorkerPool pool(unbound(threads));
    Subject subject({40 * superoffload::kChunk});
    bool all = false;
    for (std::uint64_t step = 1; step <= 300 && !all; ++step) {  // its chunks may be taken before the last wakes
        subject.freeze(step);
        const std::map<std::string, long> before = sleeps_at_rest(threads);
        does(pool, subject, Operation::step);
        all = woken(before, sleeps_at_rest(threads)) == threads;
    }
    EXPECT(all);
}
#endif

TEST(the_calling_thread_takes_part) {
    for (std::uint64_t round = 0; round < 50; ++round) {
        WorkerPool pool(unbound(1 + round % 3));
        Subject subject({kSeveralChunks, 100});
        subject.freeze(1);
        if (!succeeds(pool.run(subject.work, Operation::step))) return;
        subject.step_twin(1);
        if (!EXPECT(subject.same())) return;
    }
}

// The only worker is held up, so that the caller alone ends what it runs.
TEST(the_calling_thread_needs_no_worker) {
    WorkerPool pool(unbound(1));
    Subject held({3000});
    Subject subject({kSeveralChunks}, 4);
    held.freeze(1);
    subject.freeze(1);
    std::atomic<bool> holding{false};
    std::atomic<bool> go{false};
    const auto arrived = pending();
    const auto held_done = pool.submit(held.work, Operation::step, 1, arrived);
    held_done->when_done([&] {
        holding.store(true);
        while (!go.load()) std::this_thread::yield();
    });
    arrived->finish();
    while (!holding.load()) std::this_thread::yield();
    const auto done = pool.run(subject.work, Operation::step);
    EXPECT(done->done());
    go.store(true);
    subject.step_twin(1);
    EXPECT(succeeds(done) && subject.same());
}

TEST(what_the_calling_thread_runs_fails_as_a_workers_task_does) {
    WorkerPool pool(unbound(1));
    Subject subject({kSeveralChunks});
    subject.freeze(1);
    pool.inject_fault(1, "planted");
    const auto done = pool.run(subject.work, Operation::step);
    done->wait(kLong);
    EXPECT(done->error() == "worker thread: planted");
    subject.step_twin(1);
    EXPECT(subject.same());  // completed all the same
    EXPECT(throws<std::invalid_argument>([&] { pool.run(subject.work, Operation::step_journaled); }));
}

// ThreadSanitizer does not follow a fork of a process with threads.
#if !defined(__SANITIZE_THREAD__)
TEST(a_forked_child_gets_an_error_and_no_hang) {
    std::shared_ptr<WorkerPool> shared = WorkerPool::create(unbound(2));
    WorkerPool& pool = *shared;
    Subject subject({3000});
    subject.freeze(1);
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        const bool refused =
            throws<std::runtime_error>([&] { pool.submit(subject.work, Operation::step, 1, nullptr); });
        pool.close();
        shared.reset();
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    does(pool, subject, Operation::step);  // the parent goes on
    subject.step_twin(1);
    EXPECT(subject.same());
}

TEST(a_forked_child_may_end_what_its_parent_waits_for) {
    const std::shared_ptr<WorkerPool> pool = WorkerPool::create(unbound(2));
    Subject subject({100});
    subject.freeze(1);
    std::atomic<bool> over{false};
    std::thread busy([&] {  // a child is likely to be born while the queue is locked, for good
        Subject other({100});
        other.freeze(1);
        while (!over.load()) pool->withdraw(pool->submit(other.work, Operation::publish, 1, pending()));
    });
    std::fflush(stdout);
    for (int round = 0; round < 100; ++round) {
        const auto arrived = pending();
        const auto done = pool->submit(subject.work, Operation::publish, 1, arrived);
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);
            arrived->finish();
            _exit(0);
        }
        int status = -1;
        EXPECT(child > 0 && waitpid(child, &status, 0) == child);
        if (!EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0)) break;
        arrived->finish();
        succeeds(done);
    }
    over.store(true);
    busy.join();
}
#endif

}  // namespace
