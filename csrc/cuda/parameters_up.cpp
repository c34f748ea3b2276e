#include "parameters_up.h"

#include <chrono>
#include <thread>

namespace superoffload::cuda {
namespace {

constexpr std::uint64_t kBlocksPerUnpack = 4;  // blocks that one CUDA block of the unpack kernel takes (unpack.cuh)

}  // namespace

ParametersUp::ParametersUp(const std::shared_ptr<Gpu>& gpu, const StreamSet& streams, const Closing& closing,
                           Patience& patience)
    : streams_(streams),
      closing_(closing),
      patience_(patience),
      submitter_(
          gpu, "so-deliveries", [this](const Job& job) { return work(job); },
          [this](const std::string& error) { failed(error); }) {}

void ParametersUp::stage(const std::shared_ptr<DeviceBucket>& bucket, std::shared_ptr<Completion> after,
                         const std::vector<bool>& present) {
    bucket->stage = std::make_shared<Stage>();
    submitter_.take({bucket, std::move(after), bucket->stage->done, {}, bucket->block, bucket->stage, present});
}

bool ParametersUp::unstage(DeviceBucket& bucket) {
    const std::shared_ptr<Stage> stage = std::move(bucket.stage);
    if (!stage || stage->withdraw()) return false;
    stage->done->wait();  // its step is over, so this takes about as long as one call
    const auto is_under_way = [&] {
        if (!stage->is_sent()) return !streams_.idle();  // no event tells
        return streams_.driver().event_query(bucket.staged.get()) == kNotReady;
    };
    const double until = patience_.until();
    while (is_under_way()) {
        if (now_seconds() > until || closing_.out_of_time()) {
            bucket.half_packed = true;
            patience_.lose();
            return stage->is_sent();
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return stage->is_sent();
}

std::shared_ptr<Completion> ParametersUp::deliver(const std::shared_ptr<DeviceBucket>& bucket,
                                                  std::shared_ptr<Completion> after, Stream current,
                                                  const std::vector<DeviceAddress>& addresses) {
    streams_.record(bucket->readers, current, "cuEventRecord on the current stream");
    auto done = std::make_shared<Completion>();
    submitter_.take({bucket, std::move(after), done, addresses, bucket->block, std::move(bucket->stage), {}});
    return done;
}

std::string ParametersUp::failure() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

void ParametersUp::failed(const std::string& error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = error;
}

// ---- on the submitter thread ----------------------------------------------------------------------------------------

std::string ParametersUp::work(const Job& job) {
    if (job.addresses.empty()) return send_early(job);
    std::string error = await_step(job);
    if (!error.empty()) return error;
    job.done->began.store(now_seconds());
    enqueue(job);
    return {};
}

std::string ParametersUp::await_step(const Job& job) const {
    while (job.after && !job.after->wait(0.1)) {
        if (closing_.out_of_time()) return "the optimizer was closed before these parameters were stepped";
    }
    // A failed operation was completed even so, unless it never began: then the shadow is not that of any step.
    if (job.after && job.after->began.load() == 0) return job.after->error();
    return {};
}

// No stream waits here: the processor knows that the packed gradient has left the block, and nothing else uses it. A
// failure here is no error: the parameters go up when they are delivered, as those of any other bucket.
std::string ParametersUp::send_early(const Job& job) {
    while (!job.after->wait(0.1)) {
        if (closing_.begun()) return {};
    }
    if (!job.after->error().empty() || !job.stage->begin()) return {};
    const BucketSpec& spec = job.bucket->spec;
    const std::size_t size = adam::element_size(spec.published_type);
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t numel = 0;
    for (std::size_t i = 0; i < spec.pieces.size(); ++i) {
        if (!job.present[i]) continue;
        if (numel == 0) begin = spec.pieces[i].offset;
        end = spec.pieces[i].offset + spec.pieces[i].numel;
        numel += spec.pieces[i].numel;
    }
    try {
        copy(spec, begin, end - begin, job.block + size * begin);
        streams_.record(job.bucket->staged, streams_.up(), "cuEventRecord on the up stream");
    } catch (const DriverError&) {
        return {};
    }
    bytes_early_.fetch_add(size * numel);
    job.stage->sent();
    return {};
}

void ParametersUp::enqueue(const Job& job) const {
    DeviceBucket& b = *job.bucket;
    if (b.unpack != nullptr && (job.block != 0 || b.spec.pieces.size() > 1)) {
        copy_together(job);
    } else {
        copy_each(job);
    }
    streams_.record(b.delivered, streams_.up(), "cuEventRecord on the up stream");
    b.was_delivered.store(true);
}

void ParametersUp::await_readers(const DeviceBucket& b) const {
    streams_.order(streams_.up(), b.readers, "the up stream's wait for readers of the old parameters");
}

void ParametersUp::copy_each(const Job& job) const {
    const BucketSpec& spec = job.bucket->spec;
    await_readers(*job.bucket);
    for (std::size_t i = 0; i < job.addresses.size(); ++i) {
        if (job.addresses[i] != 0) copy(spec, spec.pieces[i].offset, spec.pieces[i].numel, job.addresses[i]);
    }
}

// Copies from the first to the last present piece into the block or staging memory, unless staged; one kernel unpacks.
void ParametersUp::copy_together(const Job& job) const {
    const DeviceBucket& b = *job.bucket;
    auto* const table = reinterpret_cast<CopyPiece*>(b.host_scratch(b.scratch.up_table));
    unsigned count = 0;
    std::uint64_t blocks = 0;
    for (std::size_t i = 0; i < job.addresses.size(); ++i) {
        if (job.addresses[i] == 0) continue;
        table[count++] = {job.addresses[i], b.spec.pieces[i].offset, b.spec.pieces[i].numel, blocks};
        blocks += b.blocks[i];
    }
    if (count == 0) return;
    const std::uint64_t begin = table[0].offset;
    const std::uint64_t end = table[count - 1].offset + table[count - 1].numel;
    DeviceAddress staged = job.block != 0 ? job.block : staging_;
    if (job.stage == nullptr || !job.stage->is_sent()) {
        copy(b.spec, begin, end - begin, staged + adam::element_size(b.spec.published_type) * begin);
    }
    TableArgument list = streams_.pass(table, count * sizeof(CopyPiece), b.device_scratch(b.scratch.up_table),
                                       streams_.up(), "cuMemcpyHtoDAsync of the unpack kernel's table");
    await_readers(b);
    void* arguments[] = {&list, &count, &staged};
    streams_.launch(b.unpack, (blocks + kBlocksPerUnpack - 1) / kBlocksPerUnpack, streams_.up(), arguments,
                    "the unpack kernel's launch");
}

void ParametersUp::copy(const BucketSpec& spec, std::uint64_t offset, std::uint64_t numel, DeviceAddress target) const {
    const std::size_t size = adam::element_size(spec.published_type);
    streams_.copy_up(target, static_cast<const char*>(spec.shadow) + size * offset, size * numel, streams_.up(),
                     "cuMemcpyHtoDAsync of new parameters");
}

}  // namespace superoffload::cuda
