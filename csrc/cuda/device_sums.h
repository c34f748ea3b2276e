// Sums bits of memory on the device and compares the sums there: one launch for any number of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "driver.h"
#include "streams.h"

namespace superoffload::cuda {

constexpr std::uint64_t kSummedBytes = 2048;  // bytes that each sum covers (bit_sums.cuh)

struct SummedRun {
    DeviceAddress memory;  // aligned to 2 bytes, with a length that is a multiple of 2
    std::uint64_t bytes;
    DeviceAddress sums;  // 8 bytes for each kSummedBytes or part of them
};

// Holds what one launch reads and writes. The caller owns its memory and keeps it until the pipeline is closed: as much
// on the host, pinned, as on the device.
class SumsTable {
   public:
    SumsTable(std::shared_ptr<Gpu> gpu, void* host, DeviceAddress device, std::size_t runs);
    static std::size_t bytes(std::size_t runs);
    std::size_t capacity() const { return capacity_; }
    // Tells whether nothing uses its memory any more.
    bool is_free() const;

   private:
    friend class DeviceSums;
    bool is_over() const;  // as is_free(), with the device's context current

    std::shared_ptr<Gpu> gpu_;
    void* host_;
    DeviceAddress device_;
    std::size_t capacity_;
    OwnedEvent over_;
    bool in_use_ = false;  // until `over_` has happened, which an error may prevent
    bool enqueued_ = false;
    bool unmarked_ = false;  // the marks on the device, one for each run, are zero
};

class DeviceSums {
   public:
    DeviceSums(const StreamSet& streams, Function sum, Function compare)
        : streams_(streams), sum_(sum), compare_(compare) {}

    // Takes the sums behind what is enqueued on `current`, without waiting. The device's context must be current.
    void take(SumsTable& table, Stream current, const std::vector<SummedRun>& runs) const;
    // Tells which runs' sums differ from those taken before; waits for `current`, at most `timeout_seconds`.
    std::vector<bool> changed(SumsTable& table, Stream current, const std::vector<SummedRun>& runs,
                              double timeout_seconds) const;

   private:
    // Keeps the table in use until the work that `enqueue` enqueues is over, also where it throws half-way.
    template <typename F>
    void use(SumsTable& table, Stream current, std::size_t runs, F&& enqueue) const;
    // Adds the number of sums to `blocks`; 0: there is nothing to launch.
    TableArgument pass_table(SumsTable& table, Stream current, const std::vector<SummedRun>& runs,
                             std::uint64_t& blocks) const;
    void launch(Function function, std::uint64_t blocks, Stream current, void** arguments, const char* what) const;

    const StreamSet& streams_;
    Function sum_;
    Function compare_;
};

}  // namespace superoffload::cuda
