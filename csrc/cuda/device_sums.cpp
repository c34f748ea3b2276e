#include "device_sums.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "../runtime/completion.h"

namespace superoffload::cuda {
namespace {

constexpr std::uint64_t kBlocksPerSum = 4;  // blocks of ours that one CUDA block takes at a time (bit_sums.cuh)
constexpr unsigned kGlances = 2000;         // queries of an event, before napping between them

// Describes a run to the kernels (bit_sums.cuh).
struct SumPiece {
    DeviceAddress memory;
    DeviceAddress sums;
    unsigned long long numel;
    unsigned long long first_block;
};

}  // namespace

SumsTable::SumsTable(std::shared_ptr<Gpu> gpu, void* host, DeviceAddress device, std::size_t runs)
    : gpu_(std::move(gpu)), host_(host), device_(device), capacity_(runs), over_(gpu_) {}

std::size_t SumsTable::bytes(std::size_t runs) { return runs * (sizeof(SumPiece) + 1); }

bool SumsTable::is_free() const {
    if (!in_use_) return true;
    const Gpu::Current here(*gpu_);
    return is_over();
}

bool SumsTable::is_over() const {
    if (!in_use_) return true;
    if (!enqueued_) return false;
    const Result result = gpu_->driver().event_query(over_.get());
    if (result == kNotReady) return false;
    gpu_->driver().check(result, "waiting for sums of bits");
    return true;
}

template <typename F>
void DeviceSums::use(SumsTable& table, Stream current, std::size_t runs, F&& enqueue) const {
    if (runs > table.capacity_ || !table.is_over())
        throw std::invalid_argument("table: in use, or too small; expected a free one with room for all runs");
    table.in_use_ = true;
    table.enqueued_ = false;
    const auto end = [&] {
        streams_.record(table.over_, current, "cuEventRecord behind sums of bits");
        table.enqueued_ = true;
    };
    try {
        enqueue();
    } catch (const DriverError&) {
        try {
            end();
        } catch (const DriverError&) {  // then no event tells when the table is free: it stays in use
        }
        throw;
    }
    end();
}

void DeviceSums::take(SumsTable& table, Stream current, const std::vector<SummedRun>& runs) const {
    use(table, current, runs.size(), [&] {
        std::uint64_t blocks = 0;
        TableArgument list = pass_table(table, current, runs, blocks);
        auto count = static_cast<unsigned>(runs.size());
        void* arguments[] = {&list, &count};
        if (blocks != 0) launch(sum_, blocks, current, arguments, "the launch that sums bits");
    });
}

std::vector<bool> DeviceSums::changed(SumsTable& table, Stream current, const std::vector<SummedRun>& runs,
                                      double timeout_seconds) const {
    const bool nothing = std::all_of(runs.begin(), runs.end(), [](const SummedRun& run) { return run.bytes == 0; });
    if (nothing) return std::vector<bool>(runs.size());
    const std::size_t marks = table.capacity_ * sizeof(SumPiece);
    auto* const marks_here = static_cast<char*>(table.host_) + marks;
    use(table, current, runs.size(), [&] {
        std::uint64_t blocks = 0;
        TableArgument list = pass_table(table, current, runs, blocks);
        auto count = static_cast<unsigned>(runs.size());
        DeviceAddress marks_there = table.device_ + marks;
        if (!table.unmarked_) {  // a copy can queue behind uploads, so only after changes
            std::memset(marks_here, 0, table.capacity_);
            streams_.copy_up(marks_there, marks_here, table.capacity_, current, "cuMemcpyHtoDAsync of cleared marks");
        }
        table.unmarked_ = false;
        void* arguments[] = {&list, &count, &marks_there};
        launch(compare_, blocks, current, arguments, "the launch that compares bits");
        streams_.copy_down(marks_here, marks_there, runs.size(), current, "cuMemcpyDtoHAsync of what has changed");
    });
    const double until = now_seconds() + timeout_seconds;
    for (unsigned glance = 0; !table.is_over(); ++glance) {
        if (now_seconds() > until) {
            throw std::runtime_error("the device has not compared sums of bits within " +
                                     std::to_string(timeout_seconds) +
                                     " s; is it hung, or shared? A longer time: SUPEROFFLOAD_DEVICE_TIMEOUT=seconds");
        }
        if (glance > kGlances) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    std::vector<bool> changes(marks_here, marks_here + runs.size());
    table.unmarked_ = std::find(changes.begin(), changes.end(), true) == changes.end();
    return changes;
}

TableArgument DeviceSums::pass_table(SumsTable& table, Stream current, const std::vector<SummedRun>& runs,
                                     std::uint64_t& blocks) const {
    auto* const pieces = static_cast<SumPiece*>(table.host_);
    for (std::size_t i = 0; i < runs.size(); ++i) {
        pieces[i] = {runs[i].memory, runs[i].sums, runs[i].bytes / 2, blocks};
        blocks += (runs[i].bytes + kSummedBytes - 1) / kSummedBytes;
    }
    const std::size_t bytes = blocks == 0 ? 0 : runs.size() * sizeof(SumPiece);
    return streams_.pass(pieces, bytes, table.device_, current, "cuMemcpyHtoDAsync of what bits are summed of");
}

void DeviceSums::launch(Function function, std::uint64_t blocks, Stream current, void** arguments,
                        const char* what) const {
    streams_.launch(function, (blocks + kBlocksPerSum - 1) / kBlocksPerSum, current, arguments, what);
}

}  // namespace superoffload::cuda
