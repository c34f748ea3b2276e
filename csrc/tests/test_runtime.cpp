// Tests the worker pool: every bucket is stepped once, errors come back, shutting down never hangs. With
// test_worker_threads.cpp this is the program that runs under ThreadSanitizer.
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "harness.h"
#include "runtime/worker_pool.h"
#include "subject.h"

using namespace harness;

namespace {

TEST(any_number_of_threads_gives_the_same_bits) {
    for (const std::size_t threads : {1, 2, 3, 5}) {
        WorkerPool pool(unbound(threads));
        EXPECT(pool.threads() == threads);
        Subject subject({kSeveralChunks, 1, 5000});
        for (std::uint64_t step = 1; step <= 3; ++step) {
            subject.freeze(step);
            does(pool, subject, Operation::step);
            subject.step_twin(step);
        }
        EXPECT(subject.same());
        EXPECT(subject.same_shadow());
        for (std::uint64_t step = 4; step <= 7; ++step) {
            const bool clipped = step % 2 == 1;
            subject.freeze(step);
            does(pool, subject, Operation::step_journaled, step < 6 ? 1 : 2);
            subject.freeze(step, clipped ? 0.25 : 1);
            if (clipped) does(pool, subject, Operation::replay);
            subject.step_twin(step, clipped ? 0.25 : 1);
        }
        EXPECT(subject.same());
        EXPECT(subject.same_shadow());
    }
}

TEST(journaled_steps_are_undone_and_replayed) {
    WorkerPool pool(unbound(3));
    for (const int width : {1, 2}) {
        Subject subject({kSeveralChunks, 333});
        subject.freeze(1);
        does(pool, subject, Operation::step_journaled, width);
        EXPECT(!subject.work->overflowed() && !subject.same());
        does(pool, subject, Operation::undo);
        EXPECT(subject.same());
        subject.freeze(1);
        does(pool, subject, Operation::step_journaled, width);
        subject.freeze(1, 0.25);
        does(pool, subject, Operation::replay);
        subject.step_twin(1, 0.25);
        EXPECT(subject.same());
        EXPECT(subject.same_shadow());
        EXPECT(subject.work->journal_use().bytes > 0);
    }
}

TEST(publish_writes_the_shadow_only) {
    WorkerPool pool(unbound(2));
    Subject subject({kSeveralChunks});
    subject.freeze(1);
    does(pool, subject, Operation::publish);
    EXPECT(subject.same());
    subject.step_twin(1);
    EXPECT(subject.same_shadow());
}

TEST(publish_and_settle_are_a_step) {
    WorkerPool pool(unbound(3));
    Subject subject({kSeveralChunks, 333});
    for (std::uint64_t step = 1; step <= 3; ++step) {
        subject.freeze(step, 0.5);
        const auto published = pool.submit(subject.work, Operation::publish, 1, nullptr);
        const auto settled = pool.submit(subject.work, Operation::settle, 1, published);
        succeeds(settled);
        succeeds(published);
        subject.step_twin(step, 0.5);
        EXPECT(subject.same());
        EXPECT(subject.same_shadow());
    }
}

TEST(settle_leaves_the_shadow_alone) {
    WorkerPool pool(unbound(2));
    Subject subject({5000});
    subject.freeze(1);
    does(pool, subject, Operation::settle);
    EXPECT(subject.same_shadow());  // the twin has not stepped yet
    subject.step_twin(1);
    EXPECT(subject.same());
    EXPECT(!subject.same_shadow());
}

TEST(a_settle_completes_behind_a_publish_that_failed) {
    WorkerPool pool(unbound(2));
    Subject subject({kSeveralChunks});
    subject.freeze(1);
    pool.inject_fault(1, "planted");
    const auto published = pool.submit(subject.work, Operation::publish, 1, nullptr);
    const auto settled = pool.submit(subject.work, Operation::settle, 1, published);
    succeeds(settled);
    EXPECT(!published->error().empty());
    subject.step_twin(1);
    EXPECT(subject.same());
    EXPECT(subject.same_shadow());
}

TEST(what_has_not_begun_can_be_withdrawn) {
    WorkerPool pool(unbound(2));
    Subject subject({kSeveralChunks});
    const auto arrived = std::make_shared<Completion>();
    subject.freeze(1);
    const auto speculated = pool.submit(subject.work, Operation::step_journaled, 1, arrived);
    EXPECT(pool.withdraw(speculated));
    EXPECT(speculated->done() && !speculated->error().empty());
    EXPECT(!pool.withdraw(speculated));
    arrived->finish();
    EXPECT(subject.same());
    does(pool, subject, Operation::step);
    subject.step_twin(1);
    EXPECT(subject.same());
    EXPECT(!pool.withdraw(std::make_shared<Completion>()));
}

TEST(withdrawing_races_with_the_workers) {
    WorkerPool pool(unbound(3));
    Subject subject({3 * superoffload::kChunk});
    for (std::uint64_t step = 1; step <= 200; ++step) {
        subject.freeze(step);
        const auto done = pool.submit(subject.work, Operation::step, 1, nullptr);
        if (step % 3 != 0) std::this_thread::yield();
        if (pool.withdraw(done)) {
            EXPECT(subject.same());
            continue;
        }
        succeeds(done);
        subject.step_twin(step);
        EXPECT(subject.same());
    }
}

TEST(runs_without_a_gradient_are_left_alone) {
    WorkerPool pool(unbound(2));
    Subject subject({4000, 3000});
    subject.work->freeze(subject.hyper, {1, 0});
    does(pool, subject, Operation::step_journaled);
    EXPECT(subject.runs[0]->state() != subject.twins[0]->state());
    EXPECT(subject.runs[1]->state() == subject.twins[1]->state());
    does(pool, subject, Operation::undo);
    EXPECT(subject.same());
}

TEST(a_full_journal_takes_the_step_back) {
    WorkerPool pool(unbound(3));
    Subject subject({kSeveralChunks}, 3, false);
    subject.freeze(1);
    does(pool, subject, Operation::step_journaled);
    EXPECT(subject.work->overflowed());
    EXPECT(subject.same());
    subject.freeze(1);
    does(pool, subject, Operation::step);
    subject.step_twin(1);
    EXPECT(subject.same());
}

TEST(work_waits_for_its_gradient) {
    WorkerPool pool(unbound(2));
    Subject early({5000});
    Subject late({5000});
    early.freeze(1);
    late.freeze(1);
    const auto arrived = std::make_shared<Completion>();
    const auto late_done = pool.submit(late.work, Operation::step, 1, arrived);
    does(pool, early, Operation::step);  // submitted later, but its gradient has arrived
    EXPECT(!late_done->wait(0.05));
    EXPECT(late.same());
    arrived->finish();
    succeeds(late_done);
    late.step_twin(1);
    EXPECT(late.same());
    EXPECT(late_done->ended.load() >= late_done->began.load() && late_done->began.load() > 0);
}

TEST(a_failed_gradient_fails_its_bucket_and_steps_nothing) {
    WorkerPool pool(unbound(2));
    Subject subject({kSeveralChunks});
    for (const Operation operation : {Operation::step, Operation::step_journaled}) {
        subject.freeze(1);
        const auto arrived = std::make_shared<Completion>();
        const auto done = pool.submit(subject.work, operation, 1, arrived);
        arrived->fail("the link broke");
        EXPECT(done->wait(kLong));
        EXPECT(done->error().find("the link broke") != std::string::npos);
        EXPECT(subject.same());
    }
}

TEST(an_error_in_a_speculated_step_restores_the_bucket) {
    WorkerPool pool(unbound(3));
    for (int chunk = 0; chunk < 3; ++chunk) {
        Subject subject({kSeveralChunks});
        subject.freeze(1);
        pool.inject_fault(chunk, "cosmic ray");
        const auto done = pool.submit(subject.work, Operation::step_journaled, 1, nullptr);
        EXPECT(done->wait(kLong));
        EXPECT(done->error().find("cosmic ray") != std::string::npos);
        EXPECT(subject.same());
        subject.freeze(1);
        does(pool, subject, Operation::step);  // the pool is as good as before
        subject.step_twin(1);
        EXPECT(subject.same());
    }
}

TEST(an_error_after_the_verdict_is_reported_with_the_step_done) {
    WorkerPool pool(unbound(2));
    Subject subject({kSeveralChunks});
    subject.freeze(1);
    pool.inject_fault(1, "cosmic ray");
    const auto done = pool.submit(subject.work, Operation::step, 1, nullptr);
    EXPECT(done->wait(kLong) && done->error().find("cosmic ray") != std::string::npos);
    subject.step_twin(1);
    EXPECT(subject.same());
}

TEST(many_buckets_from_many_threads) {
    WorkerPool pool(unbound(3));
    std::vector<std::thread> submitters;
    for (std::uint64_t t = 0; t < 3; ++t) {
        submitters.emplace_back([&pool, t] {
            Random random(t);
            Subject subject({superoffload::kChunk + 100 * t, 50}, t);
            for (std::uint64_t step = 1; step <= 12; ++step) {
                const auto arrived = std::make_shared<Completion>();
                subject.freeze(step);
                const auto done = pool.submit(subject.work, Operation::step_journaled, 2, arrived);
                std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
                arrived->finish();
                if (!succeeds(done)) return;
                const double factor = random.below(2) == 0 ? 1 : 0.5;
                if (factor != 1) {
                    subject.freeze(step, factor);
                    if (!does(pool, subject, Operation::replay)) return;
                }
                subject.step_twin(step, factor);
            }
            EXPECT(subject.same());
        });
    }
    for (std::thread& submitter : submitters) submitter.join();
}

TEST(closing_finishes_what_can_run_and_fails_the_rest) {
    auto pool = std::make_unique<WorkerPool>(unbound(2));
    Subject ready({kSeveralChunks});
    Subject waiting({5000});
    ready.freeze(1);
    waiting.freeze(1);
    const auto never = std::make_shared<Completion>();
    const auto ready_done = pool->submit(ready.work, Operation::step, 1, nullptr);
    const auto waiting_done = pool->submit(waiting.work, Operation::step, 1, never);
    pool->close();
    pool->close();
    succeeds(ready_done);
    EXPECT(waiting_done->wait(kLong) && waiting_done->error().find("closed") != std::string::npos);
    ready.step_twin(1);
    EXPECT(ready.same() && waiting.same());
    EXPECT(throws<std::runtime_error>([&] { pool->submit(ready.work, Operation::step, 1, nullptr); }));
}

TEST(pools_come_and_go) {
    for (int round = 0; round < 30; ++round) {
        Subject subject({2000});
        subject.freeze(1);
        std::shared_ptr<Completion> done;
        {
            WorkerPool pool(unbound(1 + round % 4));
            if (round % 3 != 0) done = pool.submit(subject.work, Operation::step, 1, nullptr);
        }
        if (done != nullptr) succeeds(done);
    }
}

TEST(wrong_use_throws) {
    EXPECT(throws<std::invalid_argument>([] { WorkerPool pool({}); }));
    WorkerPool pool(unbound(1));
    Subject subject({3000});
    EXPECT(throws<std::invalid_argument>([&] { subject.work->freeze(subject.hyper, {1, 2}); }));
    subject.freeze(1);
    EXPECT(throws<std::logic_error>([&] { pool.submit(subject.work, Operation::undo, 1, nullptr); }));
    EXPECT(throws<std::invalid_argument>([&] { pool.submit(subject.work, Operation::step_journaled, 3, nullptr); }));
    EXPECT(subject.same());
}

TEST(empty_buckets_are_done_at_once) {
    WorkerPool pool(unbound(1));
    Subject subject({});
    subject.freeze(1);
    EXPECT(pool.submit(subject.work, Operation::step, 1, nullptr)->done());
}

TEST(a_completion_settles_once) {
    Completion completion;
    EXPECT(!completion.done() && !completion.wait(0.001));
    completion.fail("first");
    completion.finish();
    completion.fail("second");
    EXPECT(completion.wait() && completion.error() == "first");
    EXPECT(Completion::already_done()->done());
}

TEST(busy_time_is_counted_once) {
    WorkerPool pool(unbound(3));
    Subject subject({kSeveralChunks});
    const double began = superoffload::now_seconds();
    EXPECT(pool.busy_seconds() == 0);
    subject.freeze(1);
    does(pool, subject, Operation::step);
    const double busy = pool.busy_seconds();
    EXPECT(busy > 0 && busy <= superoffload::now_seconds() - began);
    pool.enter();
    pool.enter();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    pool.leave();
    EXPECT(pool.busy_seconds() >= busy + 0.002);
    pool.leave();
    const double after = pool.busy_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT(pool.busy_seconds() == after);
}

}  // namespace

int main(int argc, char** argv) { return run_all(argc > 1 ? argv[1] : nullptr); }
