#include "gradients_down.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace superoffload::cuda {
namespace {

constexpr std::uint64_t kBlocksPerPack = 8;  // blocks of ours that one CUDA block of the pack kernel takes (pack.cuh)

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

GradientsDown::GradientsDown(std::shared_ptr<Gpu> gpu, const StreamSet& streams, const Closing& closing, void* flag,
                             Patience& patience)
    : gpu_(std::move(gpu)),
      streams_(streams),
      closing_(closing),
      flag_(*gpu_, flag),
      patience_(patience),
      watcher_(
          gpu_, "so-arrivals",
          [this](const Ticket& ticket) {
              std::string error = await(ticket);
              if (error.empty()) {
                  patience_.regain();
                  hand_over_sums(ticket);
              }
              return error;
          },
          [](const std::string&) {}) {}

void GradientsDown::set_staging(DeviceAddress address, std::uint64_t slot_bytes, unsigned slots) {
    const std::lock_guard<std::mutex> one_at_a_time(mutex_);
    staging_ = address;
    slot_bytes_ = slot_bytes;
    slots_.clear();
    for (unsigned i = 0; i < slots; ++i) slots_.push_back(std::make_unique<Slot>(gpu_));
    next_slot_ = 0;
}

std::shared_ptr<Completion> GradientsDown::pack(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                                                const std::vector<DeviceAddress>& addresses, bool keep,
                                                const std::vector<Stream>& others, DeviceAddress bit_sums) {
    const std::lock_guard<std::mutex> one_at_a_time(mutex_);
    // The table and sums are still in use if a gradient was taken back before it arrived.
    if (bucket->arrival && !bucket->arrival->wait(patience_.seconds())) {
        throw std::runtime_error("the gradients that this bucket packed before have not arrived in time");
    }
    const bool nothing = std::all_of(addresses.begin(), addresses.end(), [](DeviceAddress a) { return a == 0; });
    if (nothing) return bucket->arrival ? bucket->arrival : Completion::already_done();
    const Gpu::Current here(*gpu_);
    if (!await_failed(*bucket, now_seconds() + patience_.seconds())) {
        throw std::runtime_error("work that was enqueued before an error has not ended in time");
    }
    bucket->half_packed = true;
    Ticket ticket = enqueue(bucket, current, addresses, keep, others, bit_sums);
    bucket->half_packed = false;
    const auto done = std::make_shared<Completion>();
    ticket.done = done;
    ticket.since = now_seconds();
    done->began.store(ticket.since);
    bucket->arrival = done;
    watcher_.take(std::move(ticket));
    return done;
}

bool GradientsDown::await_failed(const DeviceBucket& bucket, double until) const {
    return !bucket.half_packed || streams_.await_idle(until);
}

// ---- on the streams -------------------------------------------------------------------------------------------------

GradientsDown::Ticket GradientsDown::enqueue(const std::shared_ptr<DeviceBucket>& bucket, Stream current,
                                             const std::vector<DeviceAddress>& addresses, bool keep,
                                             const std::vector<Stream>& others, DeviceAddress bit_sums) {
    DeviceBucket& b = *bucket;
    Ticket ticket{};
    ticket.bucket = bucket;
    ticket.summed = b.pack != nullptr;
    await_gradients(b, current, others);
    DeviceAddress target = 0;
    Slot* const slot = next_slot(b, &target);
    const std::uint64_t blocks = ticket.summed ? enqueue_kernel(b, addresses, ticket, slot, target, bit_sums)
                                               : enqueue_copies(b, addresses, ticket);
    streams_.record(b.packed, streams_.pack(), "cuEventRecord on the pack stream");
    if (keep) {
        hold_back(b, current);
        for (Stream other : others) hold_back(b, other);
    }
    streams_.order(streams_.down(), b.packed, "the down stream's wait for the pack kernel");
    if (ticket.summed && b.spec.resident == 0) copy_packed(b, addresses, target);
    if (ticket.summed) {
        streams_.copy_down(b.host_scratch(b.scratch.sums), b.device_scratch(b.scratch.sums), 8 * blocks,
                           streams_.down(), "cuMemcpyDtoHAsync of block sums");
    }
    if (slot != nullptr) {
        streams_.record(slot->copied, streams_.down(), "cuEventRecord on the down stream");
        slot->used = true;
    }
    streams_.record(b.arrived, streams_.down(), "cuEventRecord on the down stream");
    ticket.sequence = ++sequence_;
    ticket.flagged = flag_.enqueue(streams_.driver(), streams_.down(), ticket.sequence);
    return ticket;
}

// Orders the pack stream behind everything that must end before it reads the gradients and overwrites the packed one.
void GradientsDown::await_gradients(DeviceBucket& b, Stream current, const std::vector<Stream>& others) const {
    for (Stream other : others) {  // a wait is for the last recording so far, so one event serves all
        streams_.record(b.ready, other, "cuEventRecord on a stream of gradients");
        streams_.order(streams_.pack(), b.ready, "the pack stream's wait for gradients of another stream");
    }
    streams_.record(b.ready, current, "cuEventRecord on the current stream");
    streams_.order(streams_.pack(), b.ready, "the pack stream's wait for the gradients");
    // The workers write the shadow once the gradient has arrived, so the last copy out of it must be over by then.
    if (b.was_delivered.load()) {
        streams_.order(streams_.pack(), b.delivered, "the pack stream's wait for the last delivery");
    }
}

// Makes later work on the gradients' stream wait until they have been read.
void GradientsDown::hold_back(const DeviceBucket& b, Stream stream) const {
    streams_.order(stream, b.packed, "a stream's wait for the pack kernel");
}

GradientsDown::Slot* GradientsDown::next_slot(const DeviceBucket& b, DeviceAddress* target) {
    *target = b.spec.resident != 0 ? b.spec.resident : b.block;
    if (b.pack == nullptr || *target != 0) return nullptr;
    if (slots_.empty()) throw std::runtime_error("staging memory is missing; expected set_staging() before pack()");
    *target = staging_ + next_slot_ * slot_bytes_;
    Slot* const slot = slots_[next_slot_].get();
    next_slot_ = (next_slot_ + 1) % slots_.size();
    return slot;
}

std::uint64_t GradientsDown::enqueue_kernel(const DeviceBucket& b, const std::vector<DeviceAddress>& addresses,
                                            Ticket& ticket, const Slot* slot, DeviceAddress target,
                                            DeviceAddress bit_sums) const {
    auto* const table = reinterpret_cast<CopyPiece*>(b.host_scratch(b.scratch.down_table));
    std::uint64_t blocks = 0;
    unsigned count = 0;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        if (addresses[i] == 0) continue;
        table[count++] = {addresses[i], b.spec.pieces[i].offset, b.spec.pieces[i].numel, blocks};
        ticket.pieces.emplace_back(i, blocks);
        blocks += b.blocks[i];
    }
    TableArgument list = streams_.pass(table, count * sizeof(CopyPiece), b.device_scratch(b.scratch.down_table),
                                       streams_.pack(), "cuMemcpyHtoDAsync of the pack kernel's table");
    if (slot != nullptr && slot->used) {
        streams_.order(streams_.pack(), slot->copied, "the pack stream's wait for a staging slot");
    }
    DeviceAddress sums = b.device_scratch(b.scratch.sums);
    void* arguments[] = {&list, &count, &target, &sums, &bit_sums};
    streams_.launch(b.pack, (blocks + kBlocksPerPack - 1) / kBlocksPerPack, streams_.pack(), arguments,
                    "the pack kernel's launch");
    return blocks;
}

// Without kernels, copies gradients one by one; they are summed on the host.
std::uint64_t GradientsDown::enqueue_copies(const DeviceBucket& b, const std::vector<DeviceAddress>& addresses,
                                            Ticket& ticket) const {
    const std::size_t size = adam::element_size(b.spec.gradient_type);
    std::uint64_t blocks = 0;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        if (addresses[i] == 0) continue;
        const PieceSpec& piece = b.spec.pieces[i];
        streams_.copy_down(static_cast<char*>(b.spec.packed) + size * piece.offset, addresses[i], size * piece.numel,
                           streams_.pack(), "cuMemcpyDtoHAsync of a gradient");
        ticket.pieces.emplace_back(i, blocks);
        blocks += b.blocks[i];
    }
    return blocks;
}

// Copies on the down stream, in one piece unless a part of the bucket must stay as it is.
void GradientsDown::copy_packed(const DeviceBucket& b, const std::vector<DeviceAddress>& addresses,
                                DeviceAddress source) const {
    const std::size_t size = adam::element_size(b.spec.gradient_type);
    const auto copy = [&](std::uint64_t offset, std::uint64_t numel) {
        streams_.copy_down(static_cast<char*>(b.spec.packed) + size * offset, source + size * offset, size * numel,
                           streams_.down(), "cuMemcpyDtoHAsync of a packed gradient");
    };
    const PieceSpec& last = b.spec.pieces.back();
    if (std::find(addresses.begin(), addresses.end(), DeviceAddress{0}) == addresses.end()) {
        copy(0, last.offset + last.numel);
        return;
    }
    for (std::size_t i = 0; i < addresses.size(); ++i) {
        if (addresses[i] != 0) copy(b.spec.pieces[i].offset, b.spec.pieces[i].numel);
    }
}

// ---- on the watcher thread ------------------------------------------------------------------------------------------

// Returns an empty string once the ticket's gradients are in host memory. Polls the flag, and the event now and then,
// since a device that has failed never writes the flag.
std::string GradientsDown::await(const Ticket& ticket) const {
    const Driver& driver = streams_.driver();
    double asked = now_seconds();
    for (unsigned turn = 0;; ++turn) {
        if (ticket.flagged && flag_.shows(ticket.sequence)) return {};
        const double now = now_seconds();
        if (!ticket.flagged || now - asked > 0.05) {
            asked = now;
            const Result result = driver.event_query(ticket.bucket->arrived.get());
            if (result == kSuccess) return {};
            if (result != kNotReady) return driver.describe(result, "waiting for a packed gradient");
        }
        if (now - ticket.since > patience_.seconds()) {
            return "CUDA: a packed gradient has not arrived within " + std::to_string(patience_.seconds()) +
                   " s; is the device hung, or shared? A longer time: SUPEROFFLOAD_DEVICE_TIMEOUT=seconds";
        }
        if (closing_.out_of_time()) return "the optimizer was closed before this gradient arrived";
        if (turn < 2000) {
            pause();
        } else if (ticket.done->await_waiter(100e-6)) {  // the verdict waits for it
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }
}

void GradientsDown::hand_over_sums(const Ticket& ticket) const {
    const DeviceBucket& b = *ticket.bucket;
    const auto* const sums = reinterpret_cast<const double*>(b.host_scratch(b.scratch.sums));
    const std::size_t size = adam::element_size(b.spec.gradient_type);
    for (const auto& [i, first] : ticket.pieces) {
        const PieceSpec& piece = b.spec.pieces[i];
        if (ticket.summed) {
            std::memcpy(piece.block_sums, sums + first, 8 * b.blocks[i]);
        } else {
            adam::sum_of_squares(static_cast<const char*>(b.spec.packed) + size * piece.offset, b.spec.gradient_type,
                                 piece.numel, piece.block_sums);
        }
    }
}

}  // namespace superoffload::cuda
