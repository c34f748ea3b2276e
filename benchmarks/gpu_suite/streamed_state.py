"""Measures steps of state that lies in host memory, taken by the GPU in chunks and by the processors at the same time.

Several recent systems copy masters and moments to the GPU chunk by chunk, step there and copy them back. That takes 12
bytes per parameter each way, and the same host memory as the processors' own step: this says what both reach alone and
side by side.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.gpu_suite.settings import BETAS, EPS, LR, WEIGHT_DECAY
from benchmarks.workload import Workload
from superoffload import _native
from superoffload.host.processors import worker_cpus
from superoffload.links.cuda.link import CudaOptions
from superoffload.links.cuda.pinned import PinnedArena, taken

_PARTS = 3  # master, exp_avg, exp_avg_sq
_SLOTS = 3  # one goes up, one is stepped, one goes down


class StreamedState:
    """Steps ``numel`` parameters of pinned host memory on the device, ``chunk`` at a time; the gradient lies there."""

    def __init__(self, device: Device, numel: int, chunk: int) -> None:
        self.numel = numel - numel % chunk
        memory, self.pinned = _registered(device, _PARTS * self.numel)
        self._host = memory.zero_().view(-1, _PARTS, chunk)  # a chunk's three parts lie side by side
        where = device.torch
        self._slots = [torch.zeros(_PARTS, chunk, device=where) for _ in range(_SLOTS)]
        self._gradient = torch.full((chunk,), 1e-3, device=where, dtype=torch.bfloat16)
        self._parameter = torch.empty(chunk, device=where, dtype=torch.bfloat16)
        self._step = torch.ones((), device=where)
        self._up, self._down = [torch.cuda.Stream() if device.kind == "cuda" else None for _ in range(2)]
        self._device = device

    def pass_over(self) -> None:
        """Steps every parameter once, and waits."""
        free: list[Any] = [None] * _SLOTS
        for index, there in enumerate(self._host):
            slot = self._slots[index % _SLOTS]
            arrived = self._copy(slot, there, self._up, after=free[index % _SLOTS])
            self._wait_here(arrived)
            self._step_on_device(slot)
            free[index % _SLOTS] = self._copy(there, slot, self._down, after=self._record())
        self._device.synchronize()

    def _step_on_device(self, slot: Tensor) -> None:
        master, exp_avg, exp_avg_sq = slot
        torch._fused_adamw_(
            [master], [self._gradient.float()], [exp_avg], [exp_avg_sq], [], [self._step], lr=LR, beta1=BETAS[0],
            beta2=BETAS[1], weight_decay=WEIGHT_DECAY, eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip
        self._parameter.copy_(master)

    def _copy(self, target: Tensor, source: Tensor, stream: Any, after: Any) -> Any:
        if stream is None:
            target.copy_(source)
            return None
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    def _record(self) -> Any:
        return None if self._up is None else torch.cuda.current_stream().record_event()

    def _wait_here(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _registered(device: Device, numel: int) -> tuple[Tensor, bool]:
    """Returns fp32 memory as our link reserves it, and whether it is pinned."""
    if device.kind != "cuda":
        return torch.empty(numel), False
    arena = PinnedArena(_native.CudaGpu(CudaOptions.library, device.torch.index), taken(4 * numel))
    return arena.take(numel, torch.float32), arena.pinned


def measure_streamed_state(
    device_name: str, numel: int, chunk: int, seconds: float, threads: Sequence[int]
) -> dict[str, Any]:
    """Returns seconds per parameter of the device's and the processors' steps, each alone and both at once.

    ``both_seconds_per_param``: of a pass that the two share in the proportion of their speeds.
    """
    device = open_device(device_name)
    streamed = StreamedState(device, numel, chunk)
    alone = _pace([streamed.pass_over], seconds)[0] / streamed.numel
    cpus, rows = worker_cpus(None), []
    for count in sorted({min(count, len(cpus)) for count in threads}):
        pool = _native.WorkerPool(cpus[:count])
        try:
            workload = Workload(numel, pool)

            def step(pool: _native.WorkerPool = pool, workload: Workload = workload) -> None:
                pool.submit(workload.next_work(), _native.Operation.step).wait()

            (by_processors,) = _pace([step], seconds)
            device_beside, processors_beside = _pace([streamed.pass_over, step], seconds)
        finally:
            pool.close()
        pace = streamed.numel / device_beside + numel / processors_beside
        rows.append(
            {
                "threads": count,
                "processors_seconds_per_param": by_processors / numel,
                "device_beside_seconds_per_param": device_beside / streamed.numel,
                "processors_beside_seconds_per_param": processors_beside / numel,
                "both_seconds_per_param": 1 / pace,
            }
        )
    return {
        "numel": numel, "chunk": chunk, "pinned": streamed.pinned, "device_seconds_per_param": alone, "rows": rows,
        **device.facts(),
    }  # fmt: skip


def _pace(passes: Sequence[Callable[[], None]], seconds: float) -> list[float]:
    """Runs the passes side by side, again and again; returns the mean seconds of each one's that all of them ran."""
    for run in passes:
        run()  # warms up
    ends: list[list[float]] = [[] for _ in passes]
    began = time.perf_counter()

    def repeat(run: Callable[[], None], times: list[float]) -> None:
        while time.perf_counter() - began < seconds:
            run()
            times.append(time.perf_counter())

    others = [threading.Thread(target=repeat, args=pair) for pair in zip(passes[1:], ends[1:], strict=True)]
    for other in others:
        other.start()
    repeat(passes[0], ends[0])
    for other in others:
        other.join()
    return [(times[-1] - began) / len(times) for times in ends]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure_streamed_state(**json.loads(sys.argv[1]))), encoding="utf-8")
