#include "fake_device.h"

#include <chrono>

namespace fake {

World& world() {
    static auto* const made = new World;
    return *made;
}

std::vector<CUctx_st*>& contexts() {
    thread_local std::vector<CUctx_st*> made;
    return made;
}

Result enter(const char* symbol, bool needs_context) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    ++w.calls[symbol];
    const auto found = w.failures.find(symbol);
    if (found != w.failures.end() && found->second.first-- == 0) {
        const Result result = found->second.second;
        w.failures.erase(found);
        return result;
    }
    if (needs_context && (contexts().empty() || contexts().back() == nullptr)) return kInvalidContext;
    return w.broken.load();
}

bool is_event(CUevent_st* event) {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    return w.events.count(event) != 0;
}

CUstream_st* stream_of(CUstream_st* stream) {
    if (stream != nullptr) return stream;
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    if (w.legacy == nullptr) w.legacy = new CUstream_st;
    return w.legacy;
}

bool in_registration(const void* memory, std::size_t bytes, bool* any) {
    World& w = world();
    const auto* const first = static_cast<const char*>(memory);
    const std::lock_guard<std::mutex> lock(w.mutex);
    *any = false;
    for (const auto& [start, length] : w.registered) {
        if (first >= start && first + bytes <= start + length) return true;
        if (first < start + length && start < first + bytes) *any = true;
    }
    return false;
}

namespace {

double draw_delay() {
    World& w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    if (w.longest_delay <= 0) return 0;
    std::uniform_real_distribution<double> uniform(0, 1);
    return uniform(w.random) < 0.5 ? 0 : uniform(w.random) * w.longest_delay;
}

}  // namespace
}  // namespace fake

void CUstream_st::enqueue(std::function<void()> operation, bool always) {
    const double delay = fake::draw_delay();
    {
        const std::lock_guard<std::mutex> lock(mutex);
        queue.push_back({delay, always, std::move(operation)});
    }
    changed.notify_all();
}

void CUstream_st::run() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
        changed.wait(lock, [this] { return !queue.empty(); });
        const Operation operation = queue.front();
        lock.unlock();
        if (operation.delay > 0) std::this_thread::sleep_for(std::chrono::duration<double>(operation.delay));
        if (operation.always || fake::world().broken.load() == fake::kSuccess) operation.run();
        lock.lock();
        queue.pop_front();
        changed.notify_all();
    }
}
