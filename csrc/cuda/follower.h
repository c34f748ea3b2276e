// Runs a thread that follows the device or the worker threads: it takes up items, one after the other, and reports to
// the completion of each how it ended.
#pragma once

#include <pthread.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "../runtime/completion.h"
#include "driver.h"

namespace superoffload::cuda {

template <typename Item>  // has `done`, a completion
class Follower {
   public:
    // Returns the error, empty after success; may throw instead.
    using Work = std::function<std::string(const Item&)>;
    // Called before the completion fails, since its waiter might go on at once.
    using Failed = std::function<void(const std::string&)>;

    Follower(std::shared_ptr<Gpu> gpu, const char* name, Work work, Failed failed)
        : gpu_(std::move(gpu)), work_(std::move(work)), failed_(std::move(failed)) {
        thread_ = std::thread([this, name] { run(name); });
    }
    ~Follower() {
        end();
        join();
    }
    Follower(const Follower&) = delete;
    Follower& operator=(const Follower&) = delete;

    void take(Item item) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            items_.push_back(std::move(item));
        }
        changed_.notify_all();
    }

    // Waits until no item is left; false if `until` (steady clock) comes first.
    bool await_idle(double until) {
        std::unique_lock<std::mutex> lock(mutex_);
        return changed_.wait_for(lock, std::chrono::duration<double>(until - now_seconds()),
                                 [this] { return items_.empty(); });
    }

    // Ends the thread once no item is left. end() and join() are idempotent.
    void end() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
        }
        changed_.notify_all();
    }
    void join() {
        if (thread_.joinable()) thread_.join();
    }

   private:
    void run(const char* name) {
#if defined(__linux__)
        pthread_setname_np(pthread_self(), name);
        prctl(PR_SET_TIMERSLACK, 1000UL);  // nanoseconds; otherwise naps of some microseconds take 50 more
#else
        (void)name;
#endif
        const std::string unable = error_of([this] {
            gpu_->adopt_thread();
            return std::string();
        });
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return ending_ || !items_.empty(); });
            if (items_.empty()) return;
            const Item item = items_.front();
            lock.unlock();
            const std::string error = unable.empty() ? error_of([&] { return work_(item); }) : unable;
            item.done->ended.store(now_seconds());
            if (error.empty()) {
                item.done->finish();
            } else {
                failed_(error);
                item.done->fail(error);
            }
            lock.lock();
            items_.pop_front();
            changed_.notify_all();
        }
    }

    template <typename F>
    static std::string error_of(F&& work) {
        try {
            return work();
        } catch (const std::exception& error) {
            return error.what();
        }
    }

    std::shared_ptr<Gpu> gpu_;
    Work work_;
    Failed failed_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Item> items_;  // the first of them is being worked on
    bool ending_ = false;
    std::thread thread_;
};

}  // namespace superoffload::cuda
