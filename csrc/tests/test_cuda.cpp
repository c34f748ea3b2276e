// Tests the pipeline of csrc/cuda over the fake driver: the same bits as without a device, errors that end in bounded
// time. ThreadSanitizer and AddressSanitizer run this program too.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "cuda_rig.h"
#include "harness.h"
#include "runtime/worker_pool.h"

using namespace cuda_rig;

namespace {

void step_all(Device& device, const std::string& where) {
    std::vector<std::unique_ptr<Rig>> rigs;
    for (int i = 0; i < 5; ++i) rigs.push_back(std::make_unique<Rig>(device.gpu, *device.pipeline));
    const auto pool = WorkerPool::create({-1, -1});
    std::mt19937 random(7);
    for (std::uint64_t step = 1; step <= 6; ++step) {
        std::vector<std::shared_ptr<Completion>> delivered;
        for (const auto& rig : rigs) rig->fill(random);
        for (const auto& rig : rigs) {
            const adam::Hyper hyper{1e-2, 0.9, 0.99, 1e-8, 0.1, 0, 1.0, false};
            rig->work->freeze(hyper, {step, step});
            rig->plain_work->freeze(hyper, {step, step});
            const auto arrival = device.pipeline->pack(rig->bucket, device.current, rig->of(rig->gradients), false);
            const auto done = pool->submit(rig->work, Operation::step, 1, arrival);
            delivered.push_back(device.pipeline->deliver(rig->bucket, done, device.current, rig->of(rig->parameters)));
        }
        for (std::size_t i = 0; i < rigs.size(); ++i) {
            EXPECT_FOR(delivered[i]->wait(60) && delivered[i]->error().empty(), where + delivered[i]->error());
            device.pipeline->make_visible(rigs[i]->bucket, device.current);
        }
        synchronize(device.current);
        for (const auto& rig : rigs) {
            rig->plain_work->run_all(Operation::step, 1);
            for (std::size_t p = 0; p < 2; ++p) {
                EXPECT_FOR(rig->parameters[p] == rig->plain[p], where);
                std::vector<double> expected(rig->sums[p].size());
                adam::sum_of_squares(rig->gradients[p].data(), adam::ElementType::f32, rig->gradients[p].size(),
                                     expected.data());
                EXPECT_FOR(rig->sums[p] == expected, where + ": block sums");
            }
        }
    }
    pool->close();
    EXPECT(device.pipeline->close());
}

}  // namespace

TEST(steps_over_a_device_have_the_bits_of_steps_without_one) {
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
        reset();
        delays(seed, 500);
        Device device;
        step_all(device, "seed " + std::to_string(seed));
    }
}

TEST(without_kernels_gradients_are_copied_as_they_are) {
    reset();
    delays(1, 300);
    Device device("");
    step_all(device, "no kernels");
}

TEST(without_flags_events_are_asked) {
    reset();
    fake<void(int)>("fake_cuda_write_values")(0);
    Device device;
    step_all(device, "no flags");
    EXPECT(!device.pipeline->uses_flag());
}

TEST(a_failed_call_is_an_error_and_the_next_one_works) {
    reset();
    Device device;
    Rig rig(device.gpu, *device.pipeline);
    std::mt19937 random(1);
    rig.fill(random);
    for (const char* const symbol :
         {"cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuStreamWriteValue32_v2"}) {
        fail(symbol, 0, 2);
        bool thrown = false;
        try {
            device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false);
        } catch (const cuda::DriverError& error) {
            thrown = error.result == 2 && std::string(error.what()).find("out of memory") != std::string::npos;
        }
        EXPECT_FOR(thrown, symbol);
        const auto arrival = device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false);
        EXPECT_FOR(arrival->wait(60) && arrival->error().empty(), symbol);
        EXPECT_FOR(std::equal(rig.gradients[1].begin(), rig.gradients[1].end(), rig.packed + 1536), symbol);
    }
}

TEST(a_device_that_fails_ends_every_wait) {
    reset();
    Device device;
    Rig rig(device.gpu, *device.pipeline);
    fake<void(Stream, double)>("fake_cuda_sleep")(device.current, 50000);
    const auto arrival = device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false);
    break_device(719);
    EXPECT(arrival->wait(30));
    EXPECT(arrival->error().find("CUDA_ERROR_LAUNCH_FAILED") != std::string::npos);
    device.pipeline->close();
    device.settle();
    reset();
}

TEST(a_nap_ends_when_somebody_waits) {
    Completion arrival;
    EXPECT(!arrival.await_waiter(0.01));
    std::thread waiter([&arrival] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT(arrival.wait(60));
    });
    const double began = now_seconds();
    EXPECT(arrival.await_waiter(60));
    EXPECT(now_seconds() - began < 30);
    EXPECT(!arrival.done());
    arrival.finish();
    waiter.join();
    EXPECT(!arrival.await_waiter(0.01));
}

TEST(a_device_that_hangs_is_an_error_after_the_timeout) {
    reset();
    Device device("kernels", 0.2);
    Rig rig(device.gpu, *device.pipeline);
    fake<void(Stream, double)>("fake_cuda_sleep")(device.current, 1.5e6);
    const auto arrival = device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false);
    EXPECT(arrival->wait(30));
    EXPECT(arrival->error().find("SUPEROFFLOAD_DEVICE_TIMEOUT") != std::string::npos);
    EXPECT(device.pipeline->close());  // the device works again by then
}

TEST(a_delivery_whose_step_never_ran_is_not_made) {
    reset();
    Device device;
    Rig rig(device.gpu, *device.pipeline);
    const auto never = std::make_shared<Completion>();
    never->fail("closed before it ran");
    const auto delivered = device.pipeline->deliver(rig.bucket, never, device.current, rig.of(rig.parameters));
    EXPECT(delivered->wait(30));
    EXPECT(delivered->error() == "closed before it ran");
    bool refused = false;
    try {
        device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false);
    } catch (const std::runtime_error&) {
        refused = true;  // parameters are not those of the last step
    }
    EXPECT(refused);
}

// Holds two tensors, of 6 and 1 sums; the second one's length is not a multiple of a sum's block.
struct Summed {
    explicit Summed(const Device& device)
        : pinned(device.gpu, {cuda::SumsTable::bytes(2)}),
          there(cuda::SumsTable::bytes(2)),
          table(device.pipeline->make_sums_table(pinned.data(), address(there.data()), 2)) {}

    std::vector<cuda::SummedRun> runs() const {
        return {{address(one.data()), 4 * one.size(), address(sums.data())},
                {address(other.data()), 4 * other.size(), address(sums.data() + 6)}};
    }

    std::vector<float> one = std::vector<float>(3000, 1.0f);
    std::vector<float> other = std::vector<float>(77, 2.0f);
    std::vector<std::uint64_t> sums = std::vector<std::uint64_t>(7);
    PinnedMemory pinned;
    std::vector<char> there;
    std::shared_ptr<cuda::SumsTable> table;
};

TEST(bits_that_have_changed_are_found) {
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
        reset();
        delays(seed, 300);
        Device device;
        Summed s(device);
        fake<void(Stream, double)>("fake_cuda_sleep")(device.current, 20000);
        device.pipeline->take_sums(*s.table, device.current, s.runs());
        EXPECT(!s.table->is_free());  // no call has waited
        synchronize(device.current);
        EXPECT(s.table->is_free());
        for (const auto& [i, change] : {std::pair(0, false), std::pair(0, true), std::pair(1, true)}) {
            float& x = i == 0 ? s.one[2999] : s.other[5];
            if (change) x = -x;
            const std::vector<bool> changed = device.pipeline->compare_sums(*s.table, device.current, s.runs());
            EXPECT(changed == std::vector<bool>({change && i == 0, change && i == 1}));
            if (change) x = -x;
        }
        EXPECT(device.pipeline->close());
    }
}

TEST(closing_with_work_in_flight_finishes_it) {
    reset();
    Device device;
    Rig rig(device.gpu, *device.pipeline);
    fake<void(Stream, double)>("fake_cuda_sleep")(device.current, 100000);
    const auto arrival = device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false);
    EXPECT(device.pipeline->close());
    EXPECT(arrival->done() && arrival->error().empty());
}

TEST(a_forked_child_ends_cleanly) {
    reset();
    Device device;
    Rig rig(device.gpu, *device.pipeline);
    const pid_t child = fork();
    if (child == 0) {
        bool refused = false;
        try {
            device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false);
        } catch (const std::runtime_error&) {
            refused = true;
        }
        device.pipeline.reset();
        _exit(refused ? 0 : 1);
    }
    int status = -1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

TEST(memory_is_registered_in_chunks_and_released) {
    reset();
    const auto gpu = std::make_shared<Gpu>(cuda::Driver::load(library()), 0);
    const auto registered = fake<std::size_t()>("fake_cuda_registered_bytes");
    const std::size_t before = registered();
    {
        PinnedMemory memory(gpu, {1 << 20, -1, false, 3, 1 << 18});
        EXPECT(memory.pinned() && registered() == before + (1 << 20));
        EXPECT(fake<long(const char*)>("fake_cuda_calls")("cuMemHostRegister_v2") == 4);
        memory.unpin();
        EXPECT(registered() == before);
        static_cast<char*>(memory.data())[(1 << 20) - 1] = 1;
    }
    fake<void(std::size_t)>("fake_cuda_registrable")(1 << 17);
    PinnedMemory refused(gpu, {1 << 20});
    EXPECT(!refused.pinned() && refused.refusal().find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
    static_cast<char*>(refused.data())[0] = 1;
    reset();
}

TEST(a_missing_driver_is_an_error) {
    bool thrown = false;
    try {
        cuda::Driver::load("libno-such-driver.so");
    } catch (const cuda::DriverError& error) {
        thrown = std::string(error.what()).find("install the NVIDIA driver") != std::string::npos;
    }
    EXPECT(thrown);
}

int main(int count, char** arguments) { return harness::run_all(count > 1 ? arguments[1] : nullptr); }
