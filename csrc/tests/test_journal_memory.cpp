// Tests the memory that journals of several buckets share: room is given once, comes back, and never overlaps.
#include <atomic>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "runtime/journal_memory.h"
#include "subject.h"

namespace {

using harness::kSeveralChunks;
using harness::Subject;
using harness::succeeds;
using harness::throws;
using harness::unbound;
using superoffload::JournalMemory;
using superoffload::Operation;
using superoffload::WorkerPool;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

// Appends escapes as a journaled step does; false if there is no room for all of them.
bool append(JournalMemory& memory, std::uint64_t words) {
    superoffload::adam::JournalArena* const arena = memory.arena();
    if (arena->used + words > arena->capacity) return false;
    arena->used += words;
    return true;
}

TEST(codes_and_escapes_lie_one_behind_another) {
    JournalMemory memory(4096, 4096);
    const std::uint8_t* const first = memory.take_codes(1000);
    EXPECT(append(memory, 10));
    const std::uint8_t* const second = memory.take_codes(64);
    EXPECT(second == first + 1024 + 64);  // whole lines: 1000 bytes of codes, 40 of escapes
    EXPECT(memory.take_codes(4096 - 1024 - 64 - 64 + 1) == nullptr);
    EXPECT(memory.take_codes(4096 - 1024 - 64 - 64) == second + 64);
    EXPECT(!append(memory, 1));
    EXPECT(memory.held() == 4096);
    memory.written();
    memory.release_codes();
    EXPECT(memory.take_codes(1) == nullptr);  // others still hold theirs
    for (int i = 0; i < 2; ++i) {
        memory.written();
        memory.release_codes();
    }
    EXPECT(memory.take_codes(4096) == first);  // it begins anew
}

TEST(halves_lie_at_the_other_end_and_meet_the_codes) {
    JournalMemory memory(1000, 1000);  // not a multiple of a line
    auto* const codes = memory.take_codes(128);
    EXPECT(!memory.has_room_for_halves(64) && memory.take_halves(64) == nullptr);  // a step may append escapes
    EXPECT(append(memory, 16));
    memory.written();
    EXPECT(memory.has_room_for_halves(768) && !memory.has_room_for_halves(832));
    auto* const halves = reinterpret_cast<std::uint8_t*>(memory.take_halves(700));
    EXPECT(halves == codes + 256);
    EXPECT(memory.take_halves(65) == nullptr);
    EXPECT(memory.take_codes(65) == nullptr);
    auto* const more = memory.take_codes(64);
    EXPECT(more == codes + 192 && more + 64 <= halves);
    EXPECT(!append(memory, 1));
    EXPECT(memory.held() == 256 + 704);
    memory.written();
    memory.release_codes();
    memory.release_codes();
    EXPECT(memory.take_codes(257) == nullptr);  // the halves are still needed
    EXPECT(memory.take_codes(256) == codes);
    memory.release_halves();
    memory.written();
    memory.release_codes();
    EXPECT(memory.take_codes(1000 - 40) == codes);  // whole lines
}

TEST(halves_never_begin_before_what_a_journal_has_written) {
    JournalMemory memory(1000, 1000);  // of which 960 bytes are whole lines
    EXPECT(memory.take_codes(256) != nullptr && append(memory, 1));
    memory.written();
    EXPECT(!memory.has_room_for_halves(704) && memory.take_halves(704) == nullptr);
    EXPECT(memory.has_room_for_halves(640) && memory.take_halves(640) != nullptr);
}

TEST(what_spikes_needed_goes_back_after_quiet_steps) {
    JournalMemory memory(32 * kMiB, 8 * kMiB);
    const auto use = [&](std::uint64_t bytes) {
        std::uint8_t* const codes = memory.take_codes(bytes);
        codes[0] = codes[bytes - 1] = 1;
        memory.written();
        memory.release_codes();
        return codes;
    };
    EXPECT(memory.held() == 0);
    use(kMiB);
    EXPECT(memory.held() == kMiB);
    std::uint8_t* const codes = use(24 * kMiB);
    for (int step = 0; step < JournalMemory::kQuietSteps; ++step) {
        EXPECT(memory.held() == 24 * kMiB && codes[24 * kMiB - 1] == 1);
        use(8 * kMiB);
    }
    use(kMiB);
    EXPECT(memory.held() == 8 * kMiB);
#ifdef __linux__
    EXPECT(codes[24 * kMiB - 1] == 0);  // read again, the page is new
#endif
    EXPECT(codes[8 * kMiB - 1] == 1);  // what is kept stays
}

TEST(halves_that_are_in_use_are_not_given_back) {
    JournalMemory memory(32 * kMiB, 8 * kMiB);
    std::uint16_t* const halves = memory.take_halves(16 * kMiB);
    halves[0] = 7;
    const auto quiet = [&] {
        for (int step = 0; step < 2 * JournalMemory::kQuietSteps; ++step) {
            EXPECT(memory.take_codes(kMiB) != nullptr);
            memory.written();
            memory.release_codes();
        }
    };
    quiet();
    EXPECT(halves[0] == 7 && memory.held() == 17 * kMiB);
    memory.release_halves();
    quiet();
    EXPECT(memory.held() <= 8 * kMiB);
}

TEST(buckets_that_share_a_journal_are_undone_and_replayed) {
    WorkerPool pool(unbound(3));
    const auto shared = std::make_shared<JournalMemory>(8 * kMiB, 8 * kMiB);  // the codes of 30 steps, not of 40
    Subject first({kSeveralChunks, 333}, 3, true, shared);
    Subject second({kSeveralChunks}, 4, true, shared);
    Subject third({5000}, 5, true, shared);
    for (std::uint64_t step = 1; step <= 40; ++step) {
        std::vector<std::shared_ptr<superoffload::Completion>> running;
        for (Subject* each : {&first, &second, &third}) {  // at the same time: their escapes are mixed
            each->freeze(step);
            running.push_back(pool.submit(each->work, Operation::step_journaled, 1, nullptr));
        }
        for (const auto& done : running) succeeds(done);
        does(pool, first, Operation::undo);
        EXPECT(first.same());
        first.freeze(step);
        does(pool, first, Operation::step);
        second.freeze(step, 0.5);
        does(pool, second, Operation::replay);
        third.work->release_journal();
        first.step_twin(step);
        second.step_twin(step, 0.5);
        third.step_twin(step);
        EXPECT(first.same() && second.same() && third.same());
        EXPECT(!first.work->overflowed() && !second.work->overflowed() && !third.work->overflowed());
    }
}

TEST(a_bucket_that_finds_no_room_for_its_codes_is_not_stepped) {
    WorkerPool pool(unbound(2));
    const auto shared = std::make_shared<JournalMemory>(kSeveralChunks + 1024, kMiB);
    Subject subject({kSeveralChunks}, 3, true, shared);
    EXPECT(shared->take_codes(1024) != nullptr);  // of another bucket
    EXPECT(!subject.work->take_journal(2));
    EXPECT(shared->take_codes(64) != nullptr);
    EXPECT(!subject.work->take_journal(1));
    subject.freeze(1);
    does(pool, subject, Operation::step_journaled);
    EXPECT(subject.work->overflowed() && subject.same());
}

TEST(a_plain_step_ends_what_a_journal_could_undo) {
    WorkerPool pool(unbound(2));
    Subject subject({5000});
    for (const Operation operation : {Operation::undo, Operation::replay}) {
        subject.freeze(1);
        does(pool, subject, Operation::step_journaled);
        subject.step_twin(1);
        subject.freeze(2);
        does(pool, subject, Operation::step);
        subject.step_twin(2);
        EXPECT(throws<std::logic_error>([&] { pool.submit(subject.work, operation, 1, nullptr); }));
        EXPECT(subject.same());
    }
}

// ThreadSanitizer does not follow a fork of a process with threads.
#if !defined(__SANITIZE_THREAD__)
TEST(a_forked_child_never_waits_for_a_thread_of_its_parent) {
    JournalMemory memory(kMiB, kMiB);
    std::atomic<bool> over{false};
    std::thread other([&] {  // has the lock most of the time
        while (!over) memory.held();
    });
    int hung = 0;
    for (int i = 0; i < 100 && hung == 0; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);
            memory.take_codes(64);
            memory.written();
            memory.release_codes();
            _exit(memory.held() == 64 ? 0 : 1);
        }
        int status = 0;
        waitpid(child, &status, 0);
        hung += status != 0;
    }
    over = true;
    other.join();
    EXPECT(hung == 0);
}
#endif

TEST(room_comes_back_from_buckets_that_are_gone_or_never_ran) {
    const auto shared = std::make_shared<JournalMemory>(2 * kSeveralChunks + 64, kMiB);
    {
        Subject subject({kSeveralChunks}, 3, true, shared);
        EXPECT(subject.work->take_journal(1));
        EXPECT(shared->take_codes(2 * kSeveralChunks) == nullptr);
        subject.work->release_journal();
        EXPECT(subject.work->take_journal(1) && subject.work->take_journal(1));  // its own is given up first
    }
    EXPECT(shared->take_codes(2 * kSeveralChunks) != nullptr);
}

}  // namespace
