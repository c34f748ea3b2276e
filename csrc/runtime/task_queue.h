// Holds the tasks of a worker pool: those that wait for a completion, and those that a thread can take. A thread
// without a task sleeps until it is woken; no thread polls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bucket_work.h"
#include "completion.h"

namespace superoffload {

struct Task {
    std::size_t chunks() const { return work->chunks(); }
    // Counts the chunks that no thread has taken; fewer a moment later, while threads work on the task.
    std::size_t untaken() const {
        const std::size_t taken = next.load(std::memory_order_relaxed);
        return taken < chunks() ? chunks() - taken : 0;
    }

    std::shared_ptr<BucketWork> work;
    Operation operation;
    std::shared_ptr<Completion> after;  // null: can run at once
    std::shared_ptr<Completion> done;
    std::uint64_t number = 0;               // in the order of submission
    std::atomic<std::size_t> next{0};       // the next chunk that no thread has taken
    std::atomic<std::size_t> remaining{0};  // chunks not finished
    bool undoing = false;                   // a journaled step that did not fit is being undone
    std::mutex error_mutex;
    std::string error;
};

class TaskQueue : public std::enable_shared_from_this<TaskQueue> {
   public:
    using TaskPointer = std::shared_ptr<Task>;

    TaskQueue();
    TaskQueue(const TaskQueue&) = delete;
    TaskQueue& operator=(const TaskQueue&) = delete;

    // Adds a task. It can be taken once its `after` is done, which wakes threads. Throws once closing.
    void add(const TaskPointer& task);
    // Queues all chunks of a task that was run for an undo. Called by a worker, which takes a task next.
    void add_undo(const TaskPointer& task);
    // Removes a task; false if a chunk may have been taken.
    bool withdraw(const std::shared_ptr<Completion>& done);
    // Returns the task with untaken chunks that was submitted first; sleeps until there is one. Null once closing and
    // no task is left that can run.
    TaskPointer take();
    // Begins to close: take() still gives out tasks that can run, and no task is added any more.
    void begin_closing();
    // Returns the tasks that were never taken. Only once no thread takes tasks any more.
    std::vector<TaskPointer> abandon();
    // Tells whether this is a forked child. The parent's threads may have held the lock, so the child must not take it.
    bool forked() const;

   private:
    using Numbered = std::map<std::uint64_t, TaskPointer>;

    void make_ready(const std::weak_ptr<Task>& task);
    std::size_t to_wake(std::size_t chunks) const;
    void wake(std::size_t threads);

    std::mutex mutex_;
    std::condition_variable changed_;
    Numbered waiting_;  // wait for a completion
    Numbered ready_;    // may include tasks whose chunks are all taken
    std::uint64_t submitted_ = 0;
    std::size_t asleep_ = 0;
    bool closing_ = false;
    long creator_;
};

}  // namespace superoffload
