// Tests new parameters that are sent before the verdict, into a bucket's block: delivered from there, or discarded.
#include <algorithm>

#include "cuda_rig.h"
#include "harness.h"
#include "runtime/worker_pool.h"

using namespace cuda_rig;

namespace {

// Speculates and sends early at every step; undoes every other step and steps with another factor.
void stage_all(Device& device, std::uint64_t seed) {
    std::vector<std::unique_ptr<Rig>> rigs;
    for (int i = 0; i < 4; ++i) rigs.push_back(std::make_unique<Rig>(device.gpu, *device.pipeline));
    const auto pool = WorkerPool::create({-1, -1});
    std::mt19937 random(static_cast<unsigned>(seed));
    for (std::uint64_t step = 1; step <= 6; ++step) {
        const bool clips = step % 2 == 0;
        std::vector<std::shared_ptr<Completion>> done;
        for (const auto& rig : rigs) {
            rig->fill(random);
            const adam::Hyper hyper{1e-2, 0.9, 0.99, 1e-8, 0.1, 0, 1.0, false};
            rig->work->freeze(hyper, {step, step});
            const auto arrival = device.pipeline->pack(rig->bucket, device.current, rig->of(rig->gradients), false, {},
                                                       address(rig->block.data()));
            done.push_back(pool->submit(rig->work, Operation::step_journaled, 2, arrival));
            device.pipeline->stage(rig->bucket, done.back(), {true, true});
        }
        const auto before = rigs[0]->parameters;
        for (std::size_t i = 0; i < rigs.size(); ++i) {
            Rig& rig = *rigs[i];
            EXPECT(done[i]->wait(60) && done[i]->error().empty() && !rig.work->overflowed());
            const adam::Hyper hyper{1e-2, 0.9, 0.99, 1e-8, 0.1, 0, clips ? 0.25 : 1.0, false};
            if (clips) {
                device.pipeline->unstage(rig.bucket);
                rig.work->freeze(hyper, {step, step});
                done[i] = pool->submit(rig.work, Operation::replay, 2, nullptr);
            }
            rig.plain_work->freeze(hyper, {step, step});
            rig.plain_work->run_all(Operation::step, 1);
        }
        EXPECT(rigs[0]->parameters == before);
        for (std::size_t i = 0; i < rigs.size(); ++i) {
            Rig& rig = *rigs[i];
            const auto delivered =
                device.pipeline->deliver(rig.bucket, done[i], device.current, rig.of(rig.parameters));
            EXPECT_FOR(delivered->wait(60) && delivered->error().empty(), delivered->error());
            device.pipeline->make_visible(rig.bucket, device.current);
            device.pipeline->release(rig.bucket, device.current);
        }
        synchronize(device.current);
        for (const auto& rig : rigs) EXPECT_FOR(rig->parameters == rig->plain, "step " + std::to_string(step));
    }
    pool->close();
    EXPECT(device.pipeline->close());
    EXPECT(device.pipeline->bytes_early() > 0);
}

}  // namespace

TEST(what_is_sent_early_is_delivered_or_discarded) {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        reset();
        delays(seed, 300);
        Device device;
        stage_all(device, seed);
    }
}

TEST(a_copy_that_fails_early_is_made_at_its_delivery) {
    for (const char* const symbol : {"cuMemcpyHtoDAsync_v2", "cuEventRecord"}) {
        reset();
        Device device;
        Rig rig(device.gpu, *device.pipeline);
        const auto arrival = device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false, {},
                                                   address(rig.block.data()));
        EXPECT(arrival->wait(60) && arrival->error().empty());
        std::fill_n(rig.shadow, kPadded, 3.0f);
        fail(symbol, 0, 2);
        device.pipeline->stage(rig.bucket, Completion::already_done(), {true, true});
        const auto staged = rig.bucket->stage;
        EXPECT_FOR(staged->done->wait(60) && !staged->is_sent(), symbol);
        EXPECT(device.pipeline->bytes_early() == 0);
        const auto delivered =
            device.pipeline->deliver(rig.bucket, Completion::already_done(), device.current, rig.of(rig.parameters));
        EXPECT_FOR(delivered->wait(60) && delivered->error().empty(), symbol);
        device.pipeline->make_visible(rig.bucket, device.current);
        synchronize(device.current);
        EXPECT_FOR(rig.parameters[1] == std::vector<float>(2000, 3.0f), symbol);
        EXPECT(device.pipeline->close());
    }
}

TEST(what_was_not_begun_is_withdrawn_at_once) {
    reset();
    Device device;
    Rig rig(device.gpu, *device.pipeline);
    const auto arrival =
        device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false, {}, address(rig.block.data()));
    EXPECT(arrival->wait(60));
    const auto first = std::make_shared<Completion>();
    device.pipeline->stage(rig.bucket, first, {true, false});
    EXPECT(!device.pipeline->unstage(rig.bucket));  // although its step has not ended
    device.pipeline->stage(rig.bucket, Completion::already_done(), {false, true});
    const auto second = rig.bucket->stage;
    first->finish();
    EXPECT(second->done->wait(60) && second->is_sent());
    EXPECT(device.pipeline->bytes_early() == 4 * 2000);
    EXPECT(device.pipeline->unstage(rig.bucket) && !device.pipeline->unstage(rig.bucket));
    const auto failed = std::make_shared<Completion>();
    failed->fail("a worker failed");
    device.pipeline->stage(rig.bucket, failed, {true, true});
    device.pipeline->pack(rig.bucket, device.current, rig.of(rig.gradients), false);  // no delivery has failed
    EXPECT(!device.pipeline->unstage(rig.bucket));
    EXPECT(device.pipeline->close());
}
