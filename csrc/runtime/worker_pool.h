// Runs worker threads that step buckets. The caller submits an operation on a bucket and gets a completion; no Python
// object and no GIL is involved until a caller waits for it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bucket_work.h"
#include "completion.h"
#include "task_queue.h"

namespace superoffload {

// Reports that the system starts no more threads; the pool has ended all of its own.
class ThreadsRefused : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

class WorkerPool {
   public:
    // Starts one thread per entry of `cpus`, bound to that processor where the system allows it (entry < 0: not bound).
    // Throws ThreadsRefused.
    explicit WorkerPool(const std::vector<int>& cpus);
    ~WorkerPool();
    // Makes a pool that may be inherited through fork(): a child leaves its memory alone, since it can end nothing in
    // it. A pool that create() did not make must not be destroyed in a forked child.
    static std::shared_ptr<WorkerPool> create(const std::vector<int>& cpus);
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    // Starts the operation once `after` is done (null: at once). Operations on one bucket must be submitted one after
    // the other's completion; different buckets run in the order of submission, their chunks overlapping. A failed
    // chunk fails the completion: a journaled step is then undone, any other operation is completed first. A failed
    // `after` fails it likewise, except for settle: its publish has been completed and was reported. Throws
    // std::runtime_error after close() and in a forked child.
    std::shared_ptr<Completion> submit(std::shared_ptr<BucketWork> work, Operation operation, int width,
                                       std::shared_ptr<Completion> after);

    // Runs the operation in the calling thread, too: returns once no chunk is left to take, perhaps before the last one
    // is done. Not for step_journaled, whose undo only workers can begin. Throws as submit() does.
    std::shared_ptr<Completion> run(std::shared_ptr<BucketWork> work, Operation operation);

    // Cancels an operation before any of it has run, and fails its completion. False: too late.
    bool withdraw(const std::shared_ptr<Completion>& done);

    // Finishes all tasks that can run, fails those that still wait for a completion, and joins the threads. Idempotent.
    void close();

    std::size_t threads() const { return threads_.size(); }

    // Returns the seconds during which at least one thread, or the caller between enter() and leave(), was at work.
    double busy_seconds() const;
    void enter();
    void leave();

    // Makes the n-th chunk from now fail, for the project's own tests.
    void inject_fault(int chunks_until, const std::string& message);

   private:
    std::shared_ptr<Task> start(std::shared_ptr<BucketWork> work, Operation operation, int width,
                                std::shared_ptr<Completion> after);
    void work(std::size_t index, int cpu);
    void run_chunks(const std::shared_ptr<Task>& task);
    void run_chunk(Task& task, std::size_t chunk);
    void end_of_task(const std::shared_ptr<Task>& task);

    std::shared_ptr<TaskQueue> queue_;  // shared, since a completion's callback may outlive the pool
    std::vector<std::thread> threads_;

    mutable std::mutex busy_mutex_;
    int busy_ = 0;
    double busy_since_ = 0;
    double busy_total_ = 0;

    std::atomic<int> fault_countdown_{-1};
    std::string fault_message_;
};

}  // namespace superoffload
