// Defines the flag that worker threads and Python wait on: "this gradient has arrived", "this bucket is stepped".
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace superoffload {

// Returns seconds on the steady clock that all timestamps of the runtime use.
inline double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Completion {
   public:
    Completion() = default;
    Completion(const Completion&) = delete;
    Completion& operator=(const Completion&) = delete;

    static std::shared_ptr<Completion> already_done() {
        auto completion = std::make_shared<Completion>();
        completion->finish();
        return completion;
    }

    bool done() const { return done_.load(std::memory_order_acquire); }

    void finish() { settle({}); }
    void fail(std::string error) { settle(std::move(error)); }

    // Waits for the end; false if the time is up first. A negative time-out waits for ever.
    bool wait(double timeout_seconds = -1) {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto is_done = [this] { return done(); };
        bool ended = true;
        if (waiting_++ == 0) changed_.notify_all();  // for await_waiter()
        if (timeout_seconds < 0) {
            changed_.wait(lock, is_done);
        } else {
            ended = changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), is_done);
        }
        --waiting_;
        return ended;
    }

    // Tells the ending thread as soon as another thread waits for this; false after `seconds`.
    bool await_waiter(double seconds) {
        std::unique_lock<std::mutex> lock(mutex_);
        return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return waiting_ > 0; });
    }

    // Calls `told` once this is done, on the thread that ends it, or at once if it is done. `told` must neither throw
    // nor block, and should hold only weak pointers, since the objects that it uses may no longer exist.
    void when_done(std::function<void()> told) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (!done()) {
                told_.push_back(std::move(told));
                return;
            }
        }
        told();
    }

    // Returns the error, empty after success. Only meaningful once done.
    std::string error() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return error_;
    }

    // These are the times when the work began and ended (steady clock, seconds); 0 if it never ran.
    std::atomic<double> began{0};
    std::atomic<double> ended{0};

   private:
    void settle(std::string error) {
        std::vector<std::function<void()>> told;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (done()) return;
            error_ = std::move(error);
            done_.store(true, std::memory_order_release);
            told.swap(told_);
        }
        changed_.notify_all();
        for (const auto& each : told) each();
    }

    std::atomic<bool> done_{false};
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    unsigned waiting_ = 0;
    std::string error_;
    std::vector<std::function<void()>> told_;
};

}  // namespace superoffload
