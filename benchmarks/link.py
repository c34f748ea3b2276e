"""Measures what a link costs beside its copies: waiting workers, waking them, and a step's way through Python.

Steps run on a GPU, or without one over the stand-in for its driver. The stand-in's streams are threads and its copies
are `memcpy`, so the calling thread's processor time says most about a step: it is that of Python and of what it calls.
The stand-in counts copies and launches.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks import command
from superoffload import AdamW, _native
from superoffload.engine.bucket import Bucket
from superoffload.errors import SuperOffloadError
from superoffload.links.base import PackTicket
from superoffload.links.cuda.link import CudaLink, CudaOptions
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice

Row = dict[str, Any]

WAITING, ARRIVAL, STEP, PER_TENSOR, PER_BUCKET, NOTICING = (
    "waiting", "arrival to first chunk", "step", "per tensor", "per bucket", "noticing, per tensor",
)  # fmt: skip

_NUMEL = 1024  # of every bucket and tensor here: all but the arithmetic is measured
_ASLEEP_SECONDS = 1e-3  # time for workers to fall asleep again
_WARM_UP = 3  # steps; the first ones lay out buckets
_FEW, _MANY = (256, 8), (1024, 64)  # tensors, buckets


@dataclass(frozen=True)
class Rig:
    """Names the device that takes the steps. ``calls``: driver calls so far, by name, if they are counted."""

    device: torch.device
    synchronize: Callable[[], None]
    calls: Callable[[], Mapping[str, int]] = dict


# ---- waiting ---------------------------------------------------------------------------------------------------------


class _Work:
    """Supplies something small to step."""

    def __init__(self) -> None:
        self._arrays = [np.zeros(_NUMEL, np.float32) for _ in range(5)]
        f32 = _native.ElementType.f32
        master, exp_avg, exp_avg_sq, gradient, shadow = (array.ctypes.data for array in self._arrays)
        run = _native.Run(master, exp_avg, exp_avg_sq, gradient, shadow, _NUMEL, gradient_type=f32, shadow_type=f32)
        self.native = _native.BucketWork([run], 0)
        self.native.freeze(
            lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, gradient_factor=1.0, l2=False, steps=[1]
        )


@contextmanager
def _waiting_pool(threads: int) -> Iterator[_native.WorkerPool]:
    """Yields workers with a task each, none of whose gradients has arrived."""
    pool = _native.WorkerPool([-1] * threads)
    works = [_Work() for _ in range(threads)]
    arrivals = [_native.Completion() for _ in works]
    try:
        for work, arrival in zip(works, arrivals, strict=True):
            pool.submit(work.native, _native.Operation.step, after=arrival)
        time.sleep(0.1)
        yield pool
    finally:
        for arrival in arrivals:
            arrival.finish()
        pool.close()


def measure_waiting(threads: int, seconds: float) -> Row:
    """Measures the processor seconds per second that a waiting worker takes."""
    with _waiting_pool(threads):
        began, used = time.perf_counter(), time.process_time() - time.thread_time()
        time.sleep(seconds)
        took, used = time.perf_counter() - began, time.process_time() - time.thread_time() - used
    return {"name": WAITING, "threads": threads, "processors_per_worker": max(0.0, used) / took / threads}


def measure_arrivals(threads: int, count: int) -> Row:
    """Measures the time from an arrival to the first chunk of its bucket, while other buckets wait for theirs."""
    work, seconds = _Work(), []
    with _waiting_pool(threads) as pool:
        for _ in range(count):
            arrival = _native.Completion()
            done = pool.submit(work.native, _native.Operation.step, after=arrival)
            time.sleep(_ASLEEP_SECONDS)
            arrived = _native.now_seconds()
            arrival.finish()
            done.wait()
            seconds.append(done.began - arrived)
    return {
        "name": ARRIVAL,
        "threads": threads,
        "numel": _NUMEL,
        "seconds_median": median(seconds),
        "seconds_min": min(seconds),
        "seconds_p99": float(np.quantile(seconds, 0.99)),
    }


# ---- steps -----------------------------------------------------------------------------------------------------------


def measure_steps(rig: Rig, rounds: int) -> list[Row]:
    """Times steps with few and with many tensors and buckets; returns the cost of one more of each, and of comparing
    each parameter's bits with the delivered ones."""
    (tensors, buckets), (more_tensors, more_buckets) = _FEW, _MANY
    few = _measure_step(rig, tensors, buckets, rounds)
    wide = _measure_step(rig, more_tensors, buckets, rounds)
    cut = _measure_step(rig, tensors, more_buckets, rounds)
    compared = _measure_step(rig, more_tensors, buckets, rounds, compared=True)
    return [
        few, wide, cut,
        _per_one_more(NOTICING, wide, compared, more_tensors),
        _per_one_more(PER_TENSOR, few, wide, more_tensors - tensors),
        _per_one_more(PER_BUCKET, few, cut, more_buckets - buckets),
    ]  # fmt: skip


def _measure_step(rig: Rig, tensors: int, buckets: int, rounds: int, *, compared: bool = False) -> Row:
    """Times steps. ``compared``: each compares the parameters' bits, else one in 16. ``seconds_*``: of backward and
    step, less those of backward alone; ``caller_seconds_median``: likewise, of the calling thread's processor, which
    does not run backward if the device is a GPU."""
    params = [torch.zeros(_NUMEL, dtype=torch.bfloat16, device=rig.device, requires_grad=True) for _ in range(tensors)]
    gradients = [torch.ones_like(param) for param in params]
    _timed_steps(rig, params, gradients, None, 1)
    alone, alone_caller, _ = _timed_steps(rig, params, gradients, None, rounds)
    with AdamW(params, speculation="always", bucket_numel=_NUMEL * tensors // buckets) as optimizer:
        _timed_steps(rig, params, gradients, optimizer, _WARM_UP - 1)
        with warnings.catch_warnings():
            if compared:  # once such a write was found, every step compares
                warnings.simplefilter("ignore", RuntimeWarning)
                params[0].data.neg_()
            _timed_steps(rig, params, gradients, optimizer, 1)
        whole, caller, calls = _timed_steps(rig, params, gradients, optimizer, rounds)
        if optimizer.stats()["skipped_steps"]:
            raise SuperOffloadError("steps were skipped although all gradients are 1; nothing was measured")
    return {
        "name": STEP,
        "tensors": tensors,
        "buckets": buckets,
        "numel": _NUMEL * tensors,
        "seconds_median": median(whole) - median(alone),
        "seconds_min": min(whole) - min(alone),
        "caller_seconds_median": median(caller) - median(alone_caller),
        "calls_per_step": {name: count / rounds for name, count in calls.items()},
    }


def _timed_steps(
    rig: Rig, params: Sequence[Tensor], gradients: Sequence[Tensor], optimizer: AdamW | None, rounds: int
) -> tuple[list[float], list[float], dict[str, int]]:
    seconds, caller = [], []
    before = dict(rig.calls())
    for _ in range(rounds):
        began, used = time.perf_counter(), time.thread_time()
        torch.autograd.backward(params, gradients)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        caller.append(time.thread_time() - used)
        if optimizer is None:
            for param in params:
                param.grad = None
        rig.synchronize()
    return seconds, caller, {name: count - before[name] for name, count in rig.calls().items()}


def _per_one_more(name: str, few: Row, many: Row, count: int) -> Row:
    keys = ("seconds_median", "seconds_min", "caller_seconds_median")
    before, after = few["calls_per_step"], many["calls_per_step"]
    return {
        "name": name,
        **{key: (many[key] - few[key]) / count for key in keys},
        "calls": {call: (after[call] - before[call]) / count for call in after},
    }


# ---- the stand-in ----------------------------------------------------------------------------------------------------

_COUNTED = {
    "copies": ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
    "launches": ("cuLaunchKernel",),
    "event records": ("cuEventRecord",),
    "stream waits": ("cuStreamWaitEvent",),
}


class _Device(FakeDevice):
    """Leaves freed memory as it is; overwriting it would take longer than what is measured."""

    def empty(self, nbytes: int) -> Tensor:
        self.kept.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.kept[-1]


class _Link(CudaLink):
    """Keeps freed gradients until the kernels that read them have ended, as a device's allocator does."""

    def __init__(self, device: FakeDevice, options: CudaOptions) -> None:
        super().__init__(device, options)
        self._kept = device.kept

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        self._kept.extend(grad for grad in grads if grad is not None)
        return super().pack(bucket, grads)


@contextmanager
def stand_in() -> Iterator[Rig]:
    """Yields a rig whose optimizers train over the stand-in."""
    fake = Fake()
    devices: list[FakeDevice] = []

    def link_for(params: Sequence[Tensor], **_: Any) -> CudaLink:
        devices[:] = [_Device(fake)]
        return _Link(devices[0], CudaOptions(image=IMAGE, library=fake.library))

    def synchronize() -> None:
        for device in devices:
            for stream in (fake.current, *device.streams):
                fake.synchronize(stream)
            device.kept.clear()

    def calls() -> dict[str, int]:
        return {name: sum(map(fake.calls, symbols)) for name, symbols in _COUNTED.items()}

    with mock.patch("superoffload.optimizer.engine_setup.link_for", link_for):
        yield Rig(torch.device("cpu"), synchronize, calls)


# ---- what is shown --------------------------------------------------------------------------------------------------


def _line(row: Row) -> str:
    """Returns one row in words."""
    if row["name"] == WAITING:
        used = row["processors_per_worker"]
        return f"waiting, {row['threads']:>3} workers: {used:.5f} processor seconds per second, each"
    microseconds = {key: 1e6 * row[key] for key in row if "seconds_" in key}
    if row["name"] == ARRIVAL:
        return (
            f"arrival to first chunk, {row['threads']:>3} workers: {microseconds['seconds_median']:.1f} us "
            f"(99 of 100 within {microseconds['seconds_p99']:.0f})"
        )
    what = f"step, {row['tensors']} tensors in {row['buckets']} buckets" if row["name"] == STEP else row["name"]
    calls = row["calls_per_step"] if row["name"] == STEP else row["calls"]
    counted = "".join(f", {count:g} {call}" for call, count in calls.items())
    return (
        f"{what}: {microseconds['seconds_median']:.1f} us, of the calling thread's processor "
        f"{microseconds['caller_seconds_median']:.1f}{counted}"
    )


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "link",
        "Processor seconds of worker threads that wait for a gradient, and the time from an arrival to the first "
        "chunk. Also what one more tensor and one more bucket cost in a step: on a CUDA device, or without one over a "
        "stand-in for the driver.",
        plot=False,
    )
    parser.add_argument("--threads", nargs="+", type=int, default=(2, 16, 64), metavar="N", help="waiting workers")
    command.add_option(parser, "--seconds", type=float, default=3.0, help="to wait, with each number of workers")
    command.add_option(parser, "--arrivals", type=int, default=1000, help="that wake workers")
    command.add_option(parser, "--rounds", type=int, default=40, help="steps that are timed")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    command.positive(args, "threads", "seconds", "arrivals", "rounds")
    seconds, arrivals, rounds = (0.2, 20, 2) if args.quick else (args.seconds, args.arrivals, args.rounds)
    rows = [measure_waiting(threads, seconds) for threads in args.threads]
    rows += [measure_arrivals(threads, arrivals) for threads in args.threads]
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        rows += measure_steps(Rig(torch.device("cuda"), torch.cuda.synchronize), rounds)
    else:
        device = "a stand-in for the driver, whose copies are memcpy"
        with stand_in() as rig:
            rows += measure_steps(rig, rounds)
    print(f"steps on {device}")
    print("\n".join(map(_line, rows)))
    return {"device": device, "rows": rows}


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
