"""Measures what a link costs beside its copies: workers that wait for gradients, and waking them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

from benchmarks import command
from superoffload import _native

Row = dict[str, Any]

WAITING, ARRIVAL = "waiting", "arrival to first chunk"
_WORKERS = (2, 16, 64)
_NUMEL = 1024  # of every bucket: all but the arithmetic is measured
_ASLEEP_SECONDS = 1e-3  # time for workers to fall asleep again


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


def _line(row: Row) -> str:
    if row["name"] == WAITING:
        used = row["processors_per_worker"]
        return f"waiting, {row['threads']:>3} workers: {used:.5f} processor seconds per second, each"
    middle, most = 1e6 * row["seconds_median"], 1e6 * row["seconds_p99"]
    return f"{ARRIVAL}, {row['threads']:>3} workers: {middle:.1f} us (99 of 100 within {most:.0f})"


def make_parser() -> argparse.ArgumentParser:
    about = "Processor seconds of workers that wait for a gradient, and the time from an arrival to the first chunk."
    return command.parser("link", about, plot=False)


def run(args: argparse.Namespace) -> dict[str, Any]:
    seconds, arrivals = (0.2, 20) if args.quick else (3.0, 1000)
    rows = [measure_waiting(threads, seconds) for threads in _WORKERS]
    rows += [measure_arrivals(threads, arrivals) for threads in _WORKERS]
    print("\n".join(map(_line, rows)))
    return {"rows": rows}


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))
