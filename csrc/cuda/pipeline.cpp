#include "pipeline.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include <pthread.h>
#include <unistd.h>

namespace superoffload::cuda {
namespace {

constexpr double kClosingSeconds = 5;  // to finish in, once closing has begun
// Launch geometry of csrc/cuda/*.cu (pieces.cuh): threads per CUDA block, and how many of our blocks one takes.
constexpr unsigned kThreads = 128;
constexpr std::uint64_t kBlocksPerPack = 8;
constexpr std::uint64_t kBlocksPerUnpack = 4;
constexpr std::size_t kAlign = 256;

const char* name_of(adam::ElementType type) {
    switch (type) {
        case adam::ElementType::bf16:
            return "bf16";
        case adam::ElementType::f16:
            return "f16";
        default:
            return "f32";
    }
}

std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
std::uint64_t blocks_of(std::uint64_t numel) { return (numel + adam::kBlock - 1) / adam::kBlock; }

void name_thread(const char* name) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), name);
#else
    (void)name;
#endif
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Scratch memory: the table of the pack kernel, that of the unpack kernel, a word for its flag, the block sums.
struct Scratch {
    std::size_t down_table = 0;
    std::size_t up_table;
    std::size_t nonfinite;
    std::size_t sums;
    std::size_t end;

    Scratch(std::size_t pieces, std::uint64_t blocks) {
        up_table = aligned(pieces * sizeof(CopyPiece));
        nonfinite = 2 * up_table;
        sums = nonfinite + kAlign;
        end = aligned(sums + 8 * blocks);
    }
};

}  // namespace

std::size_t scratch_bytes(const std::vector<std::uint64_t>& numels) {
    std::uint64_t blocks = 0;
    for (const std::uint64_t numel : numels) blocks += blocks_of(numel);
    return Scratch(numels.size(), blocks).end;
}

OwnedEvent::OwnedEvent(std::shared_ptr<Gpu> gpu) : gpu_(std::move(gpu)), creator_(static_cast<long>(getpid())) {
    gpu_->driver().check(gpu_->driver().event_create(&event_, kEventDisableTiming), "cuEventCreate");
}

OwnedEvent::~OwnedEvent() {
    if (creator_ != static_cast<long>(getpid()) || !gpu_->try_push()) return;
    gpu_->driver().event_destroy(event_);
    Context before = nullptr;
    gpu_->driver().context_pop(&before);
}

DeviceBucket::DeviceBucket(const std::shared_ptr<Gpu>& gpu, BucketSpec spec)
    : spec_(std::move(spec)), ready_(gpu), packed_(gpu), arrived_(gpu), readers_(gpu), delivered_(gpu), stepped_(gpu) {
    for (const PieceSpec& piece : spec_.pieces) {
        blocks_.push_back(blocks_of(piece.numel));
        all_blocks_ += blocks_.back();
    }
}

// ---- construction ---------------------------------------------------------------------------------------------------

Pipeline::Pipeline(std::shared_ptr<Gpu> gpu, const Streams& streams, void* flag, const std::string& image,
                   double timeout_seconds)
    : gpu_(std::move(gpu)),
      streams_(streams),
      flag_(static_cast<std::atomic<std::uint32_t>*>(flag)),
      use_flag_(flag != nullptr),
      timeout_seconds_(timeout_seconds),
      creator_(static_cast<long>(getpid())) {
    const Gpu::Current here(*gpu_);
    const Driver& driver = gpu_->driver();
    if (flag_ != nullptr) {
        flag_->store(0);
        driver.check(driver.host_device_pointer(&flag_address_, flag, 0), "cuMemHostGetDevicePointer of the flag");
    }
    if (!image.empty()) driver.check(driver.module_load(&module_, image.data()), "cuModuleLoadData of the kernels");
    watcher_ = std::thread([this] { watch(); });
    try {
        submitter_ = std::thread([this] { submit(); });
    } catch (...) {  // the destructor will not run
        close();
        throw;
    }
}

Pipeline::~Pipeline() { close(); }

std::shared_ptr<Pipeline> Pipeline::create(std::shared_ptr<Gpu> gpu, const Streams& streams, void* flag,
                                           const std::string& image, double timeout_seconds) {
    // As with worker threads: what a forked child inherits can neither be ended nor used (WorkerPool::create).
    return {new Pipeline(std::move(gpu), streams, flag, image, timeout_seconds), [](Pipeline* pipeline) {
                if (!pipeline->forked()) delete pipeline;
            }};
}

bool Pipeline::forked() const { return creator_ != static_cast<long>(getpid()); }

void Pipeline::check_open() const {
    if (forked()) {
        throw std::runtime_error(
            "a CUDA device does not survive fork(): create the optimizer in the process that trains");
    }
    if (closing_since_.load() != 0) throw std::runtime_error("the optimizer is closed");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_.empty()) {
        throw std::runtime_error("an earlier delivery of parameters has failed, save state_dict() and restart: " +
                                 broken_);
    }
}

void Pipeline::set_staging(const Staging& staging) {
    const std::lock_guard<std::mutex> one_at_a_time(enqueue_mutex_);
    const Gpu::Current here(*gpu_);
    staging_ = staging;
    slots_.clear();
    for (unsigned i = 0; i < staging.slots; ++i) slots_.push_back(std::make_unique<Slot>(gpu_));
    next_slot_ = 0;
}

std::shared_ptr<DeviceBucket> Pipeline::make_bucket(const BucketSpec& spec) {
    check_open();
    const Gpu::Current here(*gpu_);
    auto bucket = std::make_shared<DeviceBucket>(gpu_, spec);
    const bool casts = spec.gradient_type != spec.packed_type || spec.shadow_type != spec.published_type;
    if (!has_kernels()) {
        if (casts || spec.direct) throw std::runtime_error("this transfer policy needs the kernels");
        return bucket;
    }
    bucket->pack_ = find("pack", spec.gradient_type, spec.packed_type);
    if (spec.resident != 0) {
        bucket->packed_address_ = spec.resident;
        bucket->step_ = find(spec.step_kernel);
    } else if (spec.shadow_type != spec.published_type)
        bucket->unpack_ = find("unpack", spec.shadow_type, spec.published_type);
    const Scratch scratch(spec.pieces.size(), bucket->all_blocks_);
    bucket->sums_address_ = spec.device_scratch + scratch.sums;
    if (spec.direct) {
        const Driver& driver = gpu_->driver();
        char* const sums = static_cast<char*>(spec.scratch) + scratch.sums;
        driver.check(driver.host_device_pointer(&bucket->packed_address_, spec.packed, 0),
                     "cuMemHostGetDevicePointer of a packed gradient");
        driver.check(driver.host_device_pointer(&bucket->sums_address_, sums, 0),
                     "cuMemHostGetDevicePointer of block sums");
    }
    return bucket;
}

Function Pipeline::find(const char* kind, adam::ElementType from, adam::ElementType to) const {
    return find(std::string(kind) + "_" + name_of(from) + "_" + name_of(to));
}

Function Pipeline::find(const std::string& name) const {
    Function function = nullptr;
    const Driver& driver = gpu_->driver();
    driver.check(driver.module_get_function(&function, module_, name.c_str()), ("the kernel " + name).c_str());
    return function;
}

// ---- down -----------------------------------------------------------------------------------------------------------

void Pipeline::order(Stream later, Event event, const char* what) const {
    gpu_->driver().check(gpu_->driver().stream_wait_event(later, event, 0), what);
}

void Pipeline::launch(Function function, std::uint64_t grid, Stream stream, void** arguments, const char* what) const {
    const Driver& driver = gpu_->driver();
    driver.check(
        driver.launch(function, static_cast<unsigned>(grid), 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
        what);
}

std::shared_ptr<Completion> Pipeline::pack(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                                           const std::vector<DeviceAddress>& addresses, bool keep,
                                           const std::vector<Stream>& others) {
    check_open();
    if (addresses.size() != bucket->spec_.pieces.size()) throw std::invalid_argument("one address per piece");
    const std::lock_guard<std::mutex> one_at_a_time(enqueue_mutex_);
    // Its table and sums are still in use where a gradient was taken back before it arrived.
    if (bucket->arrival_ && !bucket->arrival_->wait(timeout_seconds_)) {
        throw std::runtime_error("the gradients that were packed before have not arrived in time");
    }
    const bool nothing = std::all_of(addresses.begin(), addresses.end(), [](DeviceAddress a) { return a == 0; });
    if (nothing) return bucket->arrival_ ? bucket->arrival_ : Completion::already_done();
    const Gpu::Current here(*gpu_);
    if (bucket->half_packed_ && !await_idle_streams(now_seconds() + timeout_seconds_)) {
        throw std::runtime_error("what was enqueued before an error has not ended in time");
    }
    bucket->half_packed_ = true;
    Ticket ticket = enqueue_down(bucket, current, addresses, keep, others);
    bucket->half_packed_ = false;
    ticket.done = std::make_shared<Completion>();
    ticket.since = now_seconds();
    ticket.done->began.store(ticket.since);
    bucket->arrival_ = ticket.done;
    const std::shared_ptr<Completion> done = ticket.done;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        tickets_.push_back(std::move(ticket));
    }
    changed_.notify_all();
    return done;
}

Pipeline::Ticket Pipeline::enqueue_down(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                                        const std::vector<DeviceAddress>& addresses, bool keep,
                                        const std::vector<Stream>& others) {
    const Driver& driver = gpu_->driver();
    DeviceBucket& b = *bucket;
    Ticket ticket{};
    ticket.bucket = bucket;
    for (Stream other : others) {  // a wait is for what was recorded by then, so one event does for all
        driver.check(driver.event_record(b.ready_.get(), other), "cuEventRecord on a stream of gradients");
        order(streams_.pack, b.ready_.get(), "the pack stream's wait for gradients of another stream");
    }
    driver.check(driver.event_record(b.ready_.get(), current), "cuEventRecord on the current stream");
    order(streams_.pack, b.ready_.get(), "the pack stream's wait for the gradients");
    // The workers write the shadow once the gradient has arrived: the last copy out of it must be over by then.
    if (b.was_delivered_.load())
        order(streams_.pack, b.delivered_.get(), "the pack stream's wait for the last delivery");
    Slot* slot = nullptr;
    DeviceAddress target = b.packed_address_;
    if (b.pack_ != nullptr && !b.spec_.direct && b.spec_.resident == 0) {
        if (slots_.empty()) throw std::runtime_error("no staging memory was given");
        target = staging_.down + next_slot_ * staging_.slot_bytes;
        slot = slots_[next_slot_].get();
        next_slot_ = (next_slot_ + 1) % slots_.size();
    }
    const std::uint64_t blocks = enqueue_pack(b, addresses, ticket, slot, target);
    driver.check(driver.event_record(b.packed_.get(), streams_.pack), "cuEventRecord on the pack stream");
    if (keep) order(current, b.packed_.get(), "the current stream's wait for the pack kernel");
    order(streams_.down, b.packed_.get(), "the down stream's wait for the pack kernel");
    if (slot != nullptr) copy_pieces_down(b, addresses, target);
    if (slot != nullptr || b.spec_.resident != 0) {
        const Scratch scratch(b.spec_.pieces.size(), b.all_blocks_);
        driver.check(driver.copy_down(static_cast<char*>(b.spec_.scratch) + scratch.sums, b.sums_address_, 8 * blocks,
                                      streams_.down),
                     "cuMemcpyDtoHAsync of block sums");
    }
    if (slot != nullptr) {
        driver.check(driver.event_record(slot->copied.get(), streams_.down), "cuEventRecord on the down stream");
        slot->used = true;
    }
    driver.check(driver.event_record(b.arrived_.get(), streams_.down), "cuEventRecord on the down stream");
    ticket.sequence = ++sequence_;
    ticket.flagged = signal(ticket.sequence);
    return ticket;
}

// On the pack stream. Returns the number of blocks.
std::uint64_t Pipeline::enqueue_pack(DeviceBucket& b, const std::vector<DeviceAddress>& addresses, Ticket& ticket,
                                     Slot* slot, DeviceAddress target) {
    const Driver& driver = gpu_->driver();
    const Scratch scratch(b.spec_.pieces.size(), b.all_blocks_);
    auto* const table = reinterpret_cast<CopyPiece*>(static_cast<char*>(b.spec_.scratch) + scratch.down_table);
    std::uint64_t blocks = 0;
    unsigned count = 0;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        if (addresses[i] == 0) continue;
        table[count++] = {addresses[i], b.spec_.pieces[i].offset, b.spec_.pieces[i].numel, blocks};
        ticket.pieces.emplace_back(i, blocks);
        blocks += b.blocks_[i];
    }
    ticket.summed = b.pack_ != nullptr;
    if (b.pack_ == nullptr) {  // gradients have the packed type: copied as they are, and summed once they are here
        const std::size_t size = adam::element_size(b.spec_.packed_type);
        for (const auto& [i, first] : ticket.pieces) {
            const PieceSpec& piece = b.spec_.pieces[i];
            driver.check(driver.copy_down(static_cast<char*>(b.spec_.packed) + size * piece.offset, addresses[i],
                                          size * piece.numel, streams_.pack),
                         "cuMemcpyDtoHAsync of a gradient");
        }
        return blocks;
    }
    DeviceAddress device_table = b.spec_.device_scratch + scratch.down_table;
    driver.check(driver.copy_up(device_table, table, count * sizeof(CopyPiece), streams_.pack),
                 "cuMemcpyHtoDAsync of the pack kernel's table");
    if (slot != nullptr && slot->used) {
        order(streams_.pack, slot->copied.get(), "the pack stream's wait for a staging slot");
    }
    DeviceAddress nonfinite = b.spec_.device_scratch + scratch.nonfinite;
    DeviceAddress sums = b.sums_address_;
    void* arguments[] = {&device_table, &count, &target, &sums, &nonfinite};
    launch(b.pack_, (blocks + kBlocksPerPack - 1) / kBlocksPerPack, streams_.pack, arguments,
           "the pack kernel's launch");
    return blocks;
}

// From a staging slot, on the down stream: in one piece, unless some of the bucket must stay as it is.
void Pipeline::copy_pieces_down(const DeviceBucket& b, const std::vector<DeviceAddress>& addresses,
                                DeviceAddress source) {
    const Driver& driver = gpu_->driver();
    const std::size_t size = adam::element_size(b.spec_.packed_type);
    const auto copy = [&](std::uint64_t offset, std::uint64_t numel) {
        driver.check(driver.copy_down(static_cast<char*>(b.spec_.packed) + size * offset, source + size * offset,
                                      size * numel, streams_.down),
                     "cuMemcpyDtoHAsync of a packed gradient");
    };
    const PieceSpec& last = b.spec_.pieces.back();
    if (std::find(addresses.begin(), addresses.end(), DeviceAddress{0}) == addresses.end()) {
        copy(0, last.offset + last.numel);
        return;
    }
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        if (addresses[i] != 0) copy(b.spec_.pieces[i].offset, b.spec_.pieces[i].numel);
    }
}

// Whether the flag will show that the down stream has come to here.
bool Pipeline::signal(std::uint32_t sequence) {
    if (!use_flag_.load()) return false;
    const Driver& driver = gpu_->driver();
    const Result result = driver.stream_write_value(streams_.down, flag_address_, sequence, kWriteValueDefault);
    if (result == kNotSupported) {
        use_flag_.store(false);
        return false;
    }
    driver.check(result, "cuStreamWriteValue32 of the arrival flag");
    return true;
}

void Pipeline::watch() {
    name_thread("so-arrivals");
    std::string broken;
    try {
        gpu_->adopt_thread();
    } catch (const std::exception& error) {
        broken = error.what();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return closing_since_.load() != 0 || !tickets_.empty(); });
        if (tickets_.empty()) return;
        const Ticket ticket = tickets_.front();
        lock.unlock();
        std::string error = broken;
        if (error.empty()) error = await(ticket);
        if (error.empty()) hand_over_sums(ticket);
        ticket.done->ended.store(now_seconds());
        if (error.empty()) {
            ticket.done->finish();
        } else {
            ticket.done->fail(error);
        }
        lock.lock();
        tickets_.pop_front();
        changed_.notify_all();
    }
}

// Empty once the ticket's gradients are in host memory. Looks at the flag all the time, at the event now and then: a
// device that has failed never writes the flag.
std::string Pipeline::await(const Ticket& ticket) const {
    const Driver& driver = gpu_->driver();
    double asked = now_seconds();
    for (unsigned turn = 0;; ++turn) {
        if (ticket.flagged) {
            const std::uint32_t seen = flag_->load(std::memory_order_acquire);
            if (static_cast<std::int32_t>(seen - ticket.sequence) >= 0) return {};
        }
        const double now = now_seconds();
        if (!ticket.flagged || now - asked > 0.05) {
            asked = now;
            const Result result = driver.event_query(ticket.bucket->arrived_.get());
            if (result == kSuccess) return {};
            if (result != kNotReady) return driver.describe(result, "waiting for a packed gradient");
        }
        if (now - ticket.since > timeout_seconds_) {
            return "CUDA: a packed gradient has not arrived within " + std::to_string(timeout_seconds_) +
                   " s; is the device hung, or shared? A longer time: SUPEROFFLOAD_DEVICE_TIMEOUT=seconds";
        }
        if (out_of_time()) return "the optimizer was closed before this gradient arrived";
        if (turn < 2000) {
            pause();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(turn < 4000 ? 20 : 100));
        }
    }
}

void Pipeline::hand_over_sums(const Ticket& ticket) const {
    const DeviceBucket& b = *ticket.bucket;
    const Scratch scratch(b.spec_.pieces.size(), b.all_blocks_);
    const auto* const sums = reinterpret_cast<const double*>(static_cast<const char*>(b.spec_.scratch) + scratch.sums);
    const std::size_t size = adam::element_size(b.spec_.packed_type);
    for (const auto& [i, first] : ticket.pieces) {
        const PieceSpec& piece = b.spec_.pieces[i];
        if (ticket.summed) {
            std::memcpy(piece.block_sums, sums + first, 8 * b.blocks_[i]);
        } else {
            adam::sum_of_squares(static_cast<const char*>(b.spec_.packed) + size * piece.offset, b.spec_.packed_type,
                                 piece.numel, piece.block_sums);
        }
    }
}

// ---- up -------------------------------------------------------------------------------------------------------------

std::shared_ptr<Completion> Pipeline::deliver(const std::shared_ptr<DeviceBucket>& bucket,
                                              std::shared_ptr<Completion> after, Stream current,
                                              const std::vector<DeviceAddress>& addresses) {
    check_open();
    if (addresses.size() != bucket->spec_.pieces.size()) throw std::invalid_argument("one address per piece");
    const Gpu::Current here(*gpu_);
    const Driver& driver = gpu_->driver();
    driver.check(driver.event_record(bucket->readers_.get(), current), "cuEventRecord on the current stream");
    auto done = std::make_shared<Completion>();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        jobs_.push_back({bucket, std::move(after), done, addresses});
    }
    changed_.notify_all();
    return done;
}

void Pipeline::make_visible(const std::shared_ptr<DeviceBucket>& bucket, Stream current) {
    check_open();
    const Gpu::Current here(*gpu_);
    order(current, bucket->delivered_.get(), "the current stream's wait for new parameters");
}

void Pipeline::submit() {
    name_thread("so-deliveries");
    std::string broken;
    try {
        gpu_->adopt_thread();
    } catch (const std::exception& error) {
        broken = error.what();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return closing_since_.load() != 0 || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const Job job = jobs_.front();
        lock.unlock();
        std::string error = broken;
        if (error.empty()) error = await_step(job);
        if (error.empty()) {
            job.done->began.store(now_seconds());
            try {
                enqueue_up(job);
            } catch (const std::exception& failure) {
                error = failure.what();
            }
        }
        job.done->ended.store(now_seconds());
        lock.lock();
        if (!error.empty() && broken_.empty()) broken_ = error;  // before anybody is told, who might pack at once
        lock.unlock();
        if (error.empty()) {
            job.done->finish();
        } else {
            job.done->fail(error);
        }
        lock.lock();
        jobs_.pop_front();
        changed_.notify_all();
    }
}

std::string Pipeline::await_step(const Job& job) const {
    while (job.after && !job.after->wait(0.1)) {
        if (out_of_time()) return "the optimizer was closed before these parameters were stepped";
    }
    // A failed operation was completed even so, unless it never began: then the shadow is not that of any step.
    if (job.after && job.after->began.load() == 0) return job.after->error();
    return {};
}

void Pipeline::enqueue_up(const Job& job) {
    const Driver& driver = gpu_->driver();
    DeviceBucket& b = *job.bucket;
    const Scratch scratch(b.spec_.pieces.size(), b.all_blocks_);
    const std::size_t size = adam::element_size(b.spec_.shadow_type);
    order(streams_.up, b.readers_.get(), "the up stream's wait for readers of the old parameters");
    const bool casts = b.unpack_ != nullptr;
    auto* const table = reinterpret_cast<CopyPiece*>(static_cast<char*>(b.spec_.scratch) + scratch.up_table);
    unsigned count = 0;
    std::uint64_t blocks = 0;
    for (std::size_t i = 0; i < job.addresses.size(); ++i) {
        if (job.addresses[i] == 0) continue;
        const PieceSpec& piece = b.spec_.pieces[i];
        const DeviceAddress target = casts ? staging_.up + size * piece.offset : job.addresses[i];
        driver.check(driver.copy_up(target, static_cast<const char*>(b.spec_.shadow) + size * piece.offset,
                                    size * piece.numel, streams_.up),
                     "cuMemcpyHtoDAsync of new parameters");
        table[count++] = {job.addresses[i], piece.offset, piece.numel, blocks};
        blocks += b.blocks_[i];
    }
    if (casts && count > 0) {
        DeviceAddress device_table = b.spec_.device_scratch + scratch.up_table;
        DeviceAddress staged = staging_.up;
        driver.check(driver.copy_up(device_table, table, count * sizeof(CopyPiece), streams_.up),
                     "cuMemcpyHtoDAsync of the unpack kernel's table");
        void* arguments[] = {&device_table, &count, &staged};
        launch(b.unpack_, (blocks + kBlocksPerUnpack - 1) / kBlocksPerUnpack, streams_.up, arguments,
               "the unpack kernel's launch");
    }
    driver.check(driver.event_record(b.delivered_.get(), streams_.up), "cuEventRecord on the up stream");
    b.was_delivered_.store(true);
}

// ---- the end --------------------------------------------------------------------------------------------------------

bool Pipeline::out_of_time() const {
    const double since = closing_since_.load();
    return since != 0 && now_seconds() - since > kClosingSeconds;
}

bool Pipeline::streams_idle() const {
    const Driver& driver = gpu_->driver();
    for (Stream stream : {streams_.pack, streams_.down, streams_.up}) {
        if (driver.stream_query(stream) == kNotReady) return false;
    }
    return true;
}

bool Pipeline::await_idle_streams(double until) const {
    bool idle = streams_idle();
    for (; !idle && now_seconds() < until; idle = streams_idle()) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return idle;
}

std::string Pipeline::step(const std::shared_ptr<DeviceBucket>& bucket, Stream current, std::string table,
                           unsigned count, std::uint64_t blocks, DeviceAddress device_table) {
    check_open();
    DeviceBucket& b = *bucket;
    if (b.step_ == nullptr) throw std::invalid_argument("this bucket is not resident");
    const Gpu::Current here(*gpu_);
    const Driver& driver = gpu_->driver();
    b.step_table_ = std::move(table);  // the copy before was over when this step's gradient arrived
    order(current, b.packed_.get(), "the current stream's wait for a packed gradient");
    driver.check(driver.copy_up(device_table, b.step_table_.data(), b.step_table_.size(), current),
                 "cuMemcpyHtoDAsync of the step kernel's table");
    void* arguments[] = {&device_table, &count};
    launch(b.step_, blocks, current, arguments, "the step kernel's launch");
    const Result recorded = driver.event_record(b.stepped_.get(), current);
    return recorded == kSuccess ? std::string() : driver.describe(recorded, "cuEventRecord on the current stream");
}

bool Pipeline::has_stepped(const std::shared_ptr<DeviceBucket>& bucket) {
    const Gpu::Current here(*gpu_);
    const Result result = gpu_->driver().event_query(bucket->stepped_.get());
    if (result == kNotReady) return false;
    gpu_->driver().check(result, "waiting for a step on the device");
    return true;
}

bool Pipeline::drain(double timeout_seconds) {
    const double until = now_seconds() + timeout_seconds;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        const bool idle = changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                            [this] { return tickets_.empty() && jobs_.empty(); });
        if (!idle) return false;
    }
    if (!gpu_->try_push()) return true;  // the driver is shutting down: nothing runs any more
    const bool idle = await_idle_streams(until);
    Context before = nullptr;
    gpu_->driver().context_pop(&before);
    return idle;
}

bool Pipeline::close() {
    if (forked()) return true;
    const std::lock_guard<std::mutex> once(close_mutex_);
    if (!watcher_.joinable()) return idle_at_close_;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_since_.store(now_seconds());
    }
    changed_.notify_all();
    watcher_.join();
    if (submitter_.joinable()) submitter_.join();
    const double left = kClosingSeconds - (now_seconds() - closing_since_.load());
    idle_at_close_ = drain(std::max(0.1, left));
    if (idle_at_close_ && module_ != nullptr && gpu_->try_push()) {
        gpu_->driver().module_unload(module_);
        Context before = nullptr;
        gpu_->driver().context_pop(&before);
    }
    module_ = nullptr;
    return idle_at_close_;
}

}  // namespace superoffload::cuda
