#include "task_queue.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include <unistd.h>

namespace superoffload {
namespace {

// A woken thread wakes two more while there is work for them. So the thread that reports an arrival does not spend its
// time on waking 72 threads, and only as many threads wake as find work.
constexpr std::size_t kWokenByOne = 2;

}  // namespace

TaskQueue::TaskQueue() : creator_(static_cast<long>(getpid())) {}

bool TaskQueue::forked() const { return creator_ != static_cast<long>(getpid()); }

void TaskQueue::add(const TaskPointer& task) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) throw std::runtime_error("the optimizer is closed");
        task->number = submitted_++;
        waiting_.emplace(task->number, task);
    }
    const std::weak_ptr<Task> weak = task;
    if (!task->after) return make_ready(weak);
    task->after->when_done([queue = weak_from_this(), weak] {
        if (const auto still_there = queue.lock()) still_there->make_ready(weak);
    });
}

// Runs on the thread that has ended the completion that the task waited for.
void TaskQueue::make_ready(const std::weak_ptr<Task>& weak) {
    if (forked()) return;
    std::size_t threads = 0;
    {
        const TaskPointer task = weak.lock();
        if (!task) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        if (waiting_.erase(task->number) == 0) return;  // withdrawn, or made ready when closing began
        threads = to_wake(task->untaken());
        ready_.emplace(task->number, task);
    }
    wake(threads);
}

void TaskQueue::add_undo(const TaskPointer& task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    task->undoing = true;
    task->operation = Operation::undo;
    task->remaining.store(task->chunks());
    task->next.store(0, std::memory_order_release);
    ready_.emplace(task->number, task);
}

bool TaskQueue::withdraw(const std::shared_ptr<Completion>& done) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Numbered* const tasks : {&waiting_, &ready_}) {
        const auto found =
            std::find_if(tasks->begin(), tasks->end(), [&](const auto& entry) { return entry.second->done == done; });
        if (found == tasks->end()) continue;
        Task& task = *found->second;
        std::size_t untouched = 0;  // a worker that looks at the task now takes a chunk first, or finds none
        if (task.undoing || !task.next.compare_exchange_strong(untouched, task.chunks())) return false;
        tasks->erase(found);
        return true;
    }
    return false;
}

TaskQueue::TaskPointer TaskQueue::take() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        while (!ready_.empty() && ready_.begin()->second->untaken() == 0) ready_.erase(ready_.begin());
        if (!ready_.empty()) break;
        if (closing_) return nullptr;
        ++asleep_;
        changed_.wait(lock);
        --asleep_;
    }
    TaskPointer task = ready_.begin()->second;
    const std::size_t threads = to_wake(std::max<std::size_t>(task->untaken(), 1) - 1);  // the caller takes one
    lock.unlock();
    wake(threads);
    return task;
}

void TaskQueue::begin_closing() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        for (auto it = waiting_.begin(); it != waiting_.end();) {  // tasks whose completion is just being reported
            const bool can_run = !it->second->after || it->second->after->done();
            if (can_run) ready_.insert(*it);
            it = can_run ? waiting_.erase(it) : std::next(it);
        }
    }
    changed_.notify_all();
}

std::vector<TaskQueue::TaskPointer> TaskQueue::abandon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<TaskPointer> left;
    for (Numbered* const tasks : {&ready_, &waiting_}) {
        for (const auto& [number, task] : *tasks) {
            if (task->untaken() > 0) left.push_back(task);
        }
        tasks->clear();
    }
    return left;
}

// Returns how many threads to wake for so many chunks; called with the lock held.
std::size_t TaskQueue::to_wake(std::size_t chunks) const { return std::min({kWokenByOne, chunks, asleep_}); }

void TaskQueue::wake(std::size_t threads) {
    for (; threads > 0; --threads) changed_.notify_one();
}

}  // namespace superoffload
