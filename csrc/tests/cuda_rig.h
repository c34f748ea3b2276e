// Runs a pipeline of csrc/cuda over the fake driver, with one bucket. FAKE_CUDA names the fake's library.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/pinned.h"
#include "cuda/pipeline.h"
#include "runtime/bucket_work.h"

namespace cuda_rig {

using namespace superoffload;
using cuda::BucketSpec;
using cuda::DeviceAddress;
using cuda::DeviceBucket;
using cuda::Gpu;
using cuda::PinnedMemory;
using cuda::PinnedRequest;
using cuda::Pipeline;
using cuda::Stream;

inline const char* library() {
    const char* const named = std::getenv("FAKE_CUDA");
    if (named == nullptr) {
        std::puts("FAKE_CUDA: the fake driver's library is expected there");
        std::exit(EXIT_FAILURE);
    }
    return named;
}

// Finds a function that the fake has for tests.
template <typename F>
F* fake(const char* name) {
    static void* const handle = dlopen(library(), RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<F*>(dlsym(handle, name));
}

inline void reset() { fake<void()>("fake_cuda_reset")(); }
inline void delays(std::uint64_t seed, double microseconds) {
    fake<void(std::uint64_t, double)>("fake_cuda_delays")(seed, microseconds);
}
inline void fail(const char* symbol, int calls, int result) {
    fake<void(const char*, int, int)>("fake_cuda_fail")(symbol, calls, result);
}
inline void break_device(int result) { fake<void(int)>("fake_cuda_break")(result); }
inline Stream new_stream() { return fake<Stream()>("fake_cuda_stream")(); }
inline void synchronize(Stream stream) { fake<void(Stream)>("fake_cuda_synchronize")(stream); }

inline DeviceAddress address(const void* memory) { return reinterpret_cast<DeviceAddress>(memory); }

constexpr std::uint64_t kPadded = 4096;

// Holds one bucket of two pieces: gradients and parameters "on the device", state on the host.
struct Rig {
    Rig(const std::shared_ptr<Gpu>& gpu, Pipeline& pipeline) : pinned(gpu, {1 << 20}), scratch_on_device(1 << 16) {
        const std::vector<std::uint64_t> numels = {1500, 2000};
        const std::uint64_t offsets[] = {0, 1536};
        auto* const memory = static_cast<char*>(pinned.data());
        packed = reinterpret_cast<float*>(memory);
        shadow = reinterpret_cast<float*>(memory + 4 * kPadded);
        BucketSpec spec;
        std::vector<RunOfShard> runs;
        std::vector<RunOfShard> plain_runs;
        for (std::size_t i = 0; i < 2; ++i) {
            gradients.emplace_back(numels[i]);
            parameters.emplace_back(numels[i]);
            sums.emplace_back((numels[i] + adam::kBlock - 1) / adam::kBlock);
            spec.pieces.push_back({offsets[i], numels[i], sums[i].data()});
            runs.push_back(run_of(packed + offsets[i], shadow + offsets[i], numels[i]));
            plain.emplace_back(numels[i]);
            plain_runs.push_back(run_of(gradients[i].data(), plain[i].data(), numels[i]));
        }
        spec.packed = packed;
        spec.shadow = shadow;
        spec.scratch = memory + 8 * kPadded;
        spec.device_scratch = address(scratch_on_device.data());
        bucket = pipeline.make_bucket(spec);
        block.resize(4 * kPadded);
        work = std::make_shared<BucketWork>(runs, 8 * kPadded);
        plain_work = std::make_shared<BucketWork>(plain_runs, 0);
    }

    RunOfShard run_of(const float* gradient, float* target, std::uint64_t numel) {
        adam::Run run{};
        for (void** state : {&run.master, &run.exp_avg, &run.exp_avg_sq}) {
            states.push_back(std::make_unique<std::vector<float>>(numel, 0.0f));
            *state = states.back()->data();
        }
        run.gradient = gradient;
        run.shadow = target;
        run.numel = numel;
        run.gradient_type = run.shadow_type = adam::ElementType::f32;
        return {run, 0};
    }

    void fill(std::mt19937& random) {
        std::normal_distribution<float> normal;
        for (std::vector<float>& gradient : gradients) {
            for (float& x : gradient) x = normal(random);
        }
    }
    std::vector<DeviceAddress> of(const std::vector<std::vector<float>>& tensors) const {
        return {address(tensors[0].data()), address(tensors[1].data())};
    }

    PinnedMemory pinned;
    std::vector<char> scratch_on_device;
    std::vector<char> block;
    float* packed;
    float* shadow;
    std::vector<std::vector<float>> gradients;
    std::vector<std::vector<float>> parameters;
    std::vector<std::vector<float>> plain;  // parameters after the same steps without a device
    std::vector<std::vector<double>> sums;
    std::vector<std::unique_ptr<std::vector<float>>> states;
    std::shared_ptr<DeviceBucket> bucket;
    std::shared_ptr<BucketWork> work;
    std::shared_ptr<BucketWork> plain_work;
};

struct Device {
    explicit Device(const std::string& image = "kernels", double timeout = 60)
        : gpu(std::make_shared<Gpu>(cuda::Driver::load(library()), 0)),
          current(new_stream()),
          flag(gpu, {4096}),
          staging(3 * 4 * kPadded),
          streams({new_stream(), new_stream(), new_stream()}),
          pipeline(Pipeline::create(gpu, streams, flag.data(), image, timeout)) {
        pipeline->set_staging({address(staging.data()), 4 * kPadded, 2, address(staging.data()) + 8 * kPadded});
    }

    std::shared_ptr<Gpu> gpu;
    Stream current;
    PinnedMemory flag;
    std::vector<char> staging;
    cuda::Streams streams;
    std::shared_ptr<Pipeline> pipeline;

    // Waits for work that a broken device has left, before its memory is freed.
    void settle() const {
        for (Stream stream : {current, streams.pack, streams.down, streams.up}) synchronize(stream);
    }
};

}  // namespace cuda_rig
