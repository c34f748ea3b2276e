#include "pipeline.h"

#include <algorithm>
#include <stdexcept>

#include <unistd.h>

namespace superoffload::cuda {
namespace {

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

void check_count(const DeviceBucket& bucket, const std::vector<DeviceAddress>& addresses) {
    if (addresses.size() != bucket.spec.pieces.size()) throw std::invalid_argument("addresses: expected one per piece");
}

}  // namespace

// ---- construction ---------------------------------------------------------------------------------------------------

Pipeline::Pipeline(std::shared_ptr<Gpu> gpu, const Streams& streams, void* flag, const std::string& image,
                   double timeout_seconds)
    : gpu_(std::move(gpu)),
      streams_(gpu_, streams),
      patience_(timeout_seconds),
      gradients_(gpu_, streams_, closing_, flag, patience_),
      parameters_(gpu_, streams_, closing_, patience_),
      creator_(static_cast<long>(getpid())) {
    if (image.empty()) return;
    const Gpu::Current here(*gpu_);
    gpu_->driver().check(gpu_->driver().module_load(&module_, image.data()), "cuModuleLoadData of the kernels");
    sums_.emplace(streams_, find("sum_bits"), find("compare_bits"));
}

Pipeline::~Pipeline() { close(); }

std::shared_ptr<Pipeline> Pipeline::create(std::shared_ptr<Gpu> gpu, const Streams& streams, void* flag,
                                           const std::string& image, double timeout_seconds) {
    // A forked child can neither end nor use what it inherits, as with worker threads (WorkerPool::create).
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
    if (closing_.begun()) throw std::runtime_error("the optimizer is closed");
    const std::string failure = parameters_.failure();
    if (!failure.empty()) {
        throw std::runtime_error("an earlier delivery of parameters has failed, save state_dict() and restart: " +
                                 failure);
    }
}

void Pipeline::set_staging(const Staging& staging) {
    const Gpu::Current here(*gpu_);
    gradients_.set_staging(staging.down, staging.slot_bytes, staging.slots);
    parameters_.set_staging(staging.up);
}

std::shared_ptr<DeviceBucket> Pipeline::make_bucket(const BucketSpec& spec) {
    check_open();
    const Gpu::Current here(*gpu_);
    auto bucket = std::make_shared<DeviceBucket>(gpu_, spec);
    if (!has_kernels()) return bucket;
    bucket->pack = find(std::string("pack_") + name_of(spec.gradient_type));
    if (spec.resident != 0) {
        bucket->step = find(spec.step_kernel);
    } else {
        bucket->unpack = find("unpack_" + std::to_string(8 * adam::element_size(spec.published_type)));
    }
    return bucket;
}

Function Pipeline::find(const std::string& name) const {
    Function function = nullptr;
    const Driver& driver = gpu_->driver();
    driver.check(driver.module_get_function(&function, module_, name.c_str()), ("the kernel " + name).c_str());
    return function;
}

// ---- a bucket's way -------------------------------------------------------------------------------------------------

std::shared_ptr<Completion> Pipeline::pack(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                                           const std::vector<DeviceAddress>& addresses, bool keep,
                                           const std::vector<Stream>& others, DeviceAddress block,
                                           DeviceAddress bit_sums) {
    check_open();
    check_count(*bucket, addresses);
    if (block != 0 && bucket->unpack == nullptr)
        throw std::invalid_argument("block: given without kernels; expected 0");
    bucket->block = block;
    return gradients_.pack(bucket, current, addresses, keep, others, bit_sums);
}

void Pipeline::hold_back(const std::shared_ptr<DeviceBucket>& bucket, Stream stream) {
    const Gpu::Current here(*gpu_);
    gradients_.hold_back(*bucket, stream);
}

void Pipeline::stage(const std::shared_ptr<DeviceBucket>& bucket, std::shared_ptr<Completion> after,
                     const std::vector<bool>& present) {
    check_open();
    if (present.size() != bucket->spec.pieces.size())
        throw std::invalid_argument("present: expected one truth value per piece");
    if (bucket->block != 0) parameters_.stage(bucket, std::move(after), present);
}

bool Pipeline::unstage(const std::shared_ptr<DeviceBucket>& bucket) {
    if (forked() || bucket->stage == nullptr) return false;
    const Gpu::Current here(*gpu_);
    return parameters_.unstage(*bucket);
}

void Pipeline::release(const std::shared_ptr<DeviceBucket>& bucket, Stream stream) {
    const Gpu::Current here(*gpu_);
    parameters_.unstage(*bucket);  // discards a stage whose delivery could not be requested
    if (!gradients_.await_failed(*bucket, patience_.until())) {
        patience_.lose();
        throw std::runtime_error("work that was enqueued on a block has not ended in time");
    }
    streams_.order(stream, bucket->arrived, "a stream's wait for the copy out of a block");
    streams_.order(stream, bucket->delivered, "a stream's wait for the kernel that reads a block");
    bucket->block = 0;
}

std::shared_ptr<Completion> Pipeline::deliver(const std::shared_ptr<DeviceBucket>& bucket,
                                              std::shared_ptr<Completion> after, Stream current,
                                              const std::vector<DeviceAddress>& addresses) {
    check_open();
    check_count(*bucket, addresses);
    const Gpu::Current here(*gpu_);
    return parameters_.deliver(bucket, std::move(after), current, addresses);
}

void Pipeline::make_visible(const std::shared_ptr<DeviceBucket>& bucket, Stream current) {
    check_open();
    const Gpu::Current here(*gpu_);
    streams_.order(current, bucket->delivered, "the current stream's wait for new parameters");
}

std::string Pipeline::step(const std::shared_ptr<DeviceBucket>& bucket, Stream current, std::string table,
                           unsigned count, std::uint64_t blocks, DeviceAddress device_table) {
    check_open();
    DeviceBucket& b = *bucket;
    if (b.step == nullptr) throw std::invalid_argument("step: expected a bucket whose state is on the device");
    const Gpu::Current here(*gpu_);
    b.step_table = std::move(table);  // the previous copy ended before this step's gradient arrived
    streams_.order(current, b.packed, "the current stream's wait for a packed gradient");
    TableArgument list = streams_.pass(b.step_table.data(), b.step_table.size(), device_table, current,
                                       "cuMemcpyHtoDAsync of the step kernel's table");
    void* arguments[] = {&list, &count};
    streams_.launch(b.step, blocks, current, arguments, "the step kernel's launch");
    const Driver& driver = gpu_->driver();
    const Result recorded = driver.event_record(b.stepped.get(), current);
    return recorded == kSuccess ? std::string() : driver.describe(recorded, "cuEventRecord on the current stream");
}

bool Pipeline::has_stepped(const std::shared_ptr<DeviceBucket>& bucket) {
    const Gpu::Current here(*gpu_);
    const Result result = gpu_->driver().event_query(bucket->stepped.get());
    if (result == kNotReady) return false;
    gpu_->driver().check(result, "waiting for a step on the device");
    return true;
}

// ---- noticing edits -------------------------------------------------------------------------------------------------

std::shared_ptr<SumsTable> Pipeline::make_sums_table(void* host, DeviceAddress device, std::size_t runs) {
    check_open();
    const Gpu::Current here(*gpu_);
    return std::make_shared<SumsTable>(gpu_, host, device, runs);
}

void Pipeline::take_sums(SumsTable& table, Stream current, const std::vector<SummedRun>& runs) {
    check_open();
    const Gpu::Current here(*gpu_);
    sums_.value().take(table, current, runs);
}

std::vector<bool> Pipeline::compare_sums(SumsTable& table, Stream current, const std::vector<SummedRun>& runs) {
    check_open();
    const Gpu::Current here(*gpu_);
    return sums_.value().changed(table, current, runs, patience_.seconds());
}

// ---- the end --------------------------------------------------------------------------------------------------------

bool Pipeline::drain(double timeout_seconds) {
    const double until = now_seconds() + timeout_seconds;
    if (!gradients_.await_idle(until) || !parameters_.await_idle(until)) return false;
    if (!gpu_->try_push()) return true;  // the driver is shutting down: nothing runs any more
    const bool idle = streams_.await_idle(until);
    Context before = nullptr;
    gpu_->driver().context_pop(&before);
    return idle;
}

bool Pipeline::close(bool keep_kernels) {
    if (forked()) return true;
    const std::lock_guard<std::mutex> once(close_mutex_);
    if (closed_) return idle_at_close_;
    closed_ = true;
    closing_.begin();
    gradients_.end();
    parameters_.end();
    gradients_.join();
    parameters_.join();
    idle_at_close_ = drain(std::max(0.1, closing_.seconds_left()));
    if (idle_at_close_ && !keep_kernels && module_ != nullptr && gpu_->try_push()) {
        gpu_->driver().module_unload(module_);
        Context before = nullptr;
        gpu_->driver().context_pop(&before);
    }
    module_ = nullptr;
    return idle_at_close_;
}

}  // namespace superoffload::cuda
