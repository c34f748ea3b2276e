#include "parameters_up.h"

namespace superoffload::cuda {
namespace {

constexpr std::uint64_t kBlocksPerUnpack = 4;  // of ours that one CUDA block of the unpack kernel takes (unpack.cuh)

}  // namespace

ParametersUp::ParametersUp(const std::shared_ptr<Gpu>& gpu, const StreamSet& streams, const Closing& closing)
    : streams_(streams),
      closing_(closing),
      submitter_(
          gpu, "so-deliveries", [this](const Job& job) { return work(job); },
          [this](const std::string& error) { failed(error); }) {}

std::shared_ptr<Completion> ParametersUp::deliver(const std::shared_ptr<DeviceBucket>& bucket,
                                                  std::shared_ptr<Completion> after, Stream current,
                                                  const std::vector<DeviceAddress>& addresses) {
    streams_.record(bucket->readers, current, "cuEventRecord on the current stream");
    auto done = std::make_shared<Completion>();
    submitter_.take({bucket, std::move(after), done, addresses});
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

std::string ParametersUp::work(const Job& job) {
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

void ParametersUp::enqueue(const Job& job) const {
    DeviceBucket& b = *job.bucket;
    streams_.order(streams_.up(), b.readers, "the up stream's wait for readers of the old parameters");
    if (b.unpack != nullptr) {
        copy_together(job);
    } else {
        copy_each(job);
    }
    streams_.record(b.delivered, streams_.up(), "cuEventRecord on the up stream");
    b.was_delivered.store(true);
}

void ParametersUp::copy_each(const Job& job) const {
    const BucketSpec& spec = job.bucket->spec;
    for (std::size_t i = 0; i < job.addresses.size(); ++i) {
        if (job.addresses[i] != 0) copy(spec, spec.pieces[i].offset, spec.pieces[i].numel, job.addresses[i]);
    }
}

// Into staging memory, from the first of them to the last, and from there by one kernel.
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
    copy(b.spec, begin, end - begin, staging_ + adam::element_size(b.spec.published_type) * begin);
    DeviceAddress device_table = b.device_scratch(b.scratch.up_table);
    streams_.copy_up(device_table, table, count * sizeof(CopyPiece), streams_.up(),
                     "cuMemcpyHtoDAsync of the unpack kernel's table");
    DeviceAddress staged = staging_;
    void* arguments[] = {&device_table, &count, &staged};
    streams_.launch(b.unpack, (blocks + kBlocksPerUnpack - 1) / kBlocksPerUnpack, streams_.up(), arguments,
                    "the unpack kernel's launch");
}

void ParametersUp::copy(const BucketSpec& spec, std::uint64_t offset, std::uint64_t numel, DeviceAddress target) const {
    const std::size_t size = adam::element_size(spec.published_type);
    streams_.copy_up(target, static_cast<const char*>(spec.shadow) + size * offset, size * numel, streams_.up(),
                     "cuMemcpyHtoDAsync of new parameters");
}

}  // namespace superoffload::cuda
