#include "worker_pool.h"

#include <stdexcept>

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

namespace superoffload {
namespace {

void name_and_bind(std::size_t index, int cpu) {
    const std::string name = "superoffload-" + std::to_string(index);
#ifdef __linux__
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    if (cpu >= 0 && cpu < CPU_SETSIZE) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        // A processor that was taken away since then leaves the thread unbound.
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
    // If threads share a processor, the training thread keeps it when it hands work over.
    sched_param priority{};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &priority);
#else
    (void)cpu;
#ifdef __APPLE__
    pthread_setname_np(name.c_str());
#endif
#endif
}

}  // namespace

WorkerPool::WorkerPool(const std::vector<int>& cpus) : queue_(std::make_shared<TaskQueue>()) {
    if (cpus.empty()) throw std::invalid_argument("threads: 0, expected at least 1");
    threads_.reserve(cpus.size());
    try {
        for (std::size_t i = 0; i < cpus.size(); ++i) threads_.emplace_back([this, i, cpus] { work(i, cpus[i]); });
    } catch (const std::exception& error) {  // unjoined threads would end the process when they are destroyed
        const std::string started = std::to_string(threads_.size());
        close();
        throw ThreadsRefused(
            "threads=" + std::to_string(cpus.size()) + ": the system started only " + started +
            " of these worker threads (" + error.what() +
            "); ask for fewer with threads=, or raise the limits on processes and memory (ulimit -u, " +
            "ulimit -v, the control group's)");
    }
}

WorkerPool::~WorkerPool() { close(); }

std::shared_ptr<WorkerPool> WorkerPool::create(const std::vector<int>& cpus) {
    // The threads exist only in the parent. In a forked child their descriptors may belong to other threads, so they
    // can be neither joined nor detached, and a condition variable whose waiters are gone is never free.
    return {new WorkerPool(cpus), [](WorkerPool* pool) {
                if (!pool->queue_->forked()) delete pool;
            }};
}

std::shared_ptr<Completion> WorkerPool::submit(std::shared_ptr<BucketWork> work, Operation operation, int width,
                                               std::shared_ptr<Completion> after) {
    return start(std::move(work), operation, width, std::move(after))->done;
}

std::shared_ptr<Completion> WorkerPool::run(std::shared_ptr<BucketWork> work, Operation operation) {
    if (operation == Operation::step_journaled) {
        throw std::invalid_argument("run: a journaled step, expected an operation that is never undone; submit() it");
    }
    const std::shared_ptr<Task> task = start(std::move(work), operation, 1, nullptr);
    run_chunks(task);
    return task->done;
}

std::shared_ptr<Task> WorkerPool::start(std::shared_ptr<BucketWork> work, Operation operation, int width,
                                        std::shared_ptr<Completion> after) {
    if (queue_->forked()) {
        throw std::runtime_error(
            "worker threads do not survive fork(): create the optimizer in the process that trains, after forking");
    }
    auto task = std::make_shared<Task>();
    task->done = std::make_shared<Completion>();
    work->begin(operation, width);
    task->remaining.store(work->chunks());
    task->work = std::move(work);
    task->operation = operation;
    task->after = std::move(after);
    if (task->work->chunks() == 0) {
        task->work->end(operation);
        task->done->finish();
    } else {
        queue_->add(task);
    }
    return task;
}

bool WorkerPool::withdraw(const std::shared_ptr<Completion>& done) {
    if (!queue_->withdraw(done)) return false;
    done->fail("withdrawn before it began");
    return true;
}

void WorkerPool::close() {
    if (queue_->forked()) return;
    queue_->begin_closing();
    for (std::thread& thread : threads_) {
        if (thread.joinable()) thread.join();
    }
    for (const std::shared_ptr<Task>& task : queue_->abandon()) {
        task->done->fail("the optimizer was closed before this ran");
    }
}

void WorkerPool::work(std::size_t index, int cpu) {
    name_and_bind(index, cpu);
    while (const std::shared_ptr<Task> task = queue_->take()) run_chunks(task);
}

void WorkerPool::run_chunks(const std::shared_ptr<Task>& task) {
    const std::size_t chunks = task->work->chunks();
    for (;;) {
        const std::size_t chunk = task->next.fetch_add(1, std::memory_order_acq_rel);
        if (chunk >= chunks) return;
        if (chunk == 0 && !task->undoing) {
            enter();
            task->done->began.store(now_seconds());
        }
        run_chunk(*task, chunk);
        if (task->remaining.fetch_sub(1, std::memory_order_acq_rel) == 1) return end_of_task(task);
    }
}

void WorkerPool::run_chunk(Task& task, std::size_t chunk) {
    std::string error;
    if (task.after && task.operation != Operation::settle) error = task.after->error();
    if (error.empty()) {
        if (fault_countdown_.load() >= 0 && fault_countdown_.fetch_sub(1) == 0) error = fault_message_;
        // Only a speculated step can be undone. An operation after the verdict is completed even so, so that no bucket
        // is left half-way, and the failure is reported with the step done.
        if (error.empty() || task.operation != Operation::step_journaled) task.work->run_chunk(task.operation, chunk);
    }
    if (error.empty()) return;
    const std::lock_guard<std::mutex> lock(task.error_mutex);
    if (task.error.empty()) task.error = error;
}

void WorkerPool::end_of_task(const std::shared_ptr<Task>& task) {
    // All threads together undo a speculated step that did not fit its journal, or that failed.
    const bool take_back = task->operation == Operation::step_journaled && !task->undoing &&
                           (task->work->overflowed() || !task->error.empty());
    if (take_back) {
        queue_->add_undo(task);
        return;
    }
    task->work->end(task->operation);
    task->done->ended.store(now_seconds());
    leave();
    if (task->error.empty()) {
        task->done->finish();
    } else {
        task->done->fail("worker thread: " + task->error);
    }
}

double WorkerPool::busy_seconds() const {
    const std::lock_guard<std::mutex> lock(busy_mutex_);
    return busy_total_ + (busy_ > 0 ? now_seconds() - busy_since_ : 0);
}

void WorkerPool::enter() {
    const std::lock_guard<std::mutex> lock(busy_mutex_);
    if (busy_++ == 0) busy_since_ = now_seconds();
}

void WorkerPool::leave() {
    const std::lock_guard<std::mutex> lock(busy_mutex_);
    if (--busy_ == 0) busy_total_ += now_seconds() - busy_since_;
}

void WorkerPool::inject_fault(int chunks_until, const std::string& message) {
    fault_message_ = message;
    fault_countdown_.store(chunks_until);
}

}  // namespace superoffload
