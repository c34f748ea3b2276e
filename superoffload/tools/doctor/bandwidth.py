"""Measures memory bandwidth in about a second, over the arrays of one step: loads and stores alone, then the step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from superoffload import _native
from superoffload.host.system import System, largest_cache_bytes
from superoffload.tools.doctor.findings import Examination
from superoffload.tools.doctor.host_memory import GIB
from superoffload.tools.doctor.memory_limit import Arrays, Way, all_ways, streams_of

_BYTES_PER_ELEMENT = 4 + 4 + 4 + 2 + 2 + 2
_LEAST_BYTES, _MOST_BYTES = 256 << 20, 4 * GIB
_SECONDS = 1.0
_STEPS = 8
_STEP_BYTES = 28.0  # master and moments both ways, gradient, shadow
# A tenth of one DDR4 channel: less points at the machine, not at the measurement.
_SUSPICIOUS = 2e9


class _Vector:
    """Wraps a NumPy array for `streams_of`."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def element_size(self) -> int:
        return int(self._array.itemsize)

    def numel(self) -> int:
        return int(self._array.size)

    def fill(self, value: int) -> None:
        self._array.fill(value)


def examine_bandwidth(system: System, cpus: Sequence[int], usable_bytes: int | None, superchip: bool) -> Examination:
    """Measures with one thread bound to each of `cpus`, the real processors of this process."""
    found = Examination("memory bandwidth")
    numel = _choose_numel(system, usable_bytes)
    began = time.perf_counter()
    rate, way, walks = measure(numel, cpus)
    stepping = measure_step(numel, cpus)
    found.facts.update(
        bytes_per_second=rate,
        step_bytes_per_second=stepping,
        threads=len(cpus),
        buffer_bytes=numel * _BYTES_PER_ELEMENT,
        walks=walks,
        way=way.describe(),
        seconds=round(time.perf_counter() - began, 3),
    )
    found.ok(
        f"{rate / 1e9:.1f} GB/s with {len(cpus)} threads over the arrays of one step "
        f"({numel * _BYTES_PER_ELEMENT / 2**20:.0f} MiB), so a step of 1 B bf16 parameters takes "
        f"{28e9 / rate:.2g} s at that rate; the kernel's own step reaches {stepping / 1e9:.1f} GB/s"
    )
    if rate < _SUSPICIOUS:
        found.warn(
            f"{rate / 1e9:.2f} GB/s is very little for one pass over memory",
            "look for other programs, for swapping and for a processor quota, and run doctor again",
        )
    if superchip and rate < 300e9:
        found.warn(
            f"a Grace processor reads and writes up to 450 GB/s; here it is {rate / 1e9:.0f}",
            "use all 72 cores of one node (numactl --cpunodebind=0 --membind=0), and see the other findings",
        )
    return found


def _choose_numel(system: System, usable_bytes: int | None) -> int:
    """Returns four times the largest cache, as far as an eighth of the usable memory allows."""
    wanted = min(max(4 * largest_cache_bytes(system), _LEAST_BYTES), _MOST_BYTES)
    if usable_bytes is not None:
        wanted = min(wanted, max(usable_bytes // 8, 1 << 20))
    return max(1 << 14, wanted // _BYTES_PER_ELEMENT)


def measure(numel: int, cpus: Sequence[int], seconds: float = _SECONDS) -> tuple[float, Way, int]:
    """Returns (bytes per second, fastest way, walks made): walks every way once, then again for `seconds`."""
    arrays = _arrays(numel)
    everything = [arrays.master, arrays.exp_avg, arrays.exp_avg_sq, arrays.gradient, arrays.shadow]
    touch = [_native.Stream(array.data_ptr(), array.element_size(), _native.Access.write) for array in everything]
    loops = _native.memory_loops()[0]
    _native.walk_memory(touch, numel, 256, loops, False, list(cpus), 1)  # pages land where their thread is
    streams, bytes_per_param = streams_of("step", 1, arrays)
    best: dict[Way, float] = {}
    walks, began = 0, time.perf_counter()
    while True:
        for way in all_ways():
            if walks >= len(all_ways()) and time.perf_counter() - began > seconds:
                fastest = min(best, key=best.__getitem__)
                return bytes_per_param * numel / best[fastest], fastest, walks
            took = _native.walk_memory(streams, numel, way.block, way.loops, way.streaming_stores, list(cpus), 1)
            best[way] = min(best.get(way, float("inf")), took)
            walks += 1


def measure_step(numel: int, cpus: Sequence[int], steps: int = _STEPS) -> float:
    """Returns bytes per second of the plain step, bf16 gradient and shadow, with one worker thread per processor."""
    vectors = _vectors(numel)
    for vector in vectors:
        vector.fill(0)
    master, exp_avg, exp_avg_sq, gradient, shadow = (vector.data_ptr() for vector in vectors)
    run = _native.Run(
        master=master,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        gradient=gradient,
        shadow=shadow,
        numel=numel,
        gradient_type=_native.ElementType.bf16,
        shadow_type=_native.ElementType.bf16,
        past_cache=True,  # as is any model that needs this project
    )
    work = _native.BucketWork([run], 0)
    work.freeze(1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0, False, [1])
    pool = _native.WorkerPool(list(cpus))
    best = float("inf")
    try:
        for _ in range(steps):
            began = time.perf_counter()
            pool.submit(work, _native.Operation.step).wait()
            best = min(best, time.perf_counter() - began)
    finally:
        pool.close()
    return _STEP_BYTES * numel / best


def _vectors(numel: int) -> list[_Vector]:
    """Returns master, exp_avg, exp_avg_sq, gradient, shadow."""
    kinds = (np.float32, np.float32, np.float32, np.uint16, np.uint16)
    return [_Vector(np.empty(numel, kind)) for kind in kinds]


def _arrays(numel: int) -> Arrays:
    master, exp_avg, exp_avg_sq, gradient, shadow = _vectors(numel)
    return Arrays(master, exp_avg, exp_avg_sq, gradient, shadow, codes=_Vector(np.empty(1, np.uint16)))
