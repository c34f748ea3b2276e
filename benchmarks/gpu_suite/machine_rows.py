"""Measures what the machine itself can do: the link both ways and together, and a CPU step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.adam.kernels import measure
from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.timing import Contestant, Rounds, interleave
from superoffload import kernels
from superoffload.host.processors import worker_cpus

_ROUNDS = Rounds(5, 50, 3.0)


def measure_link(device_name: str, numbytes: int) -> dict[str, Any]:
    """Returns GB/s of copies between pinned memory and the device: down, up, and both at once (each way).

    The host memory is our link's own. On a GPU ``torch_*`` has the same with memory that torch's allocator pinned.
    """
    device = open_device(device_name)
    host, pinned = _registered(device, numbytes)
    rates = _rates(device, host)
    if device.kind == "cuda":
        by_torch = [torch.empty(numbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        rates.update((f"torch_{name}", rate) for name, rate in _rates(device, by_torch).items())
    return {"bytes": numbytes, "pinned": pinned, **rates, **device.facts()}


def _registered(device: Device, numbytes: int) -> tuple[list[Tensor], bool]:
    """Returns memory for each direction as our link reserves it, and whether it is pinned."""
    if device.kind != "cuda":
        return [torch.empty(numbytes, dtype=torch.uint8) for _ in range(2)], False
    from superoffload import _native
    from superoffload.links.cuda.link import CudaOptions
    from superoffload.links.cuda.pinned import PinnedArena, taken

    arena = PinnedArena(_native.CudaGpu(CudaOptions.library, device.torch.index), 2 * taken(numbytes))
    return [arena.take(numbytes, torch.uint8) for _ in range(2)], arena.pinned


def _rates(device: Device, host: list[Tensor]) -> dict[str, float]:
    there = [torch.empty_like(memory, device=device.torch) for memory in host]
    streams: list[Any] = [torch.cuda.Stream() for _ in range(2)] if device.kind == "cuda" else [None, None]

    def down() -> None:
        _copy(host[0], there[0], streams[0])

    def up() -> None:
        _copy(there[1], host[1], streams[1])

    def both() -> None:
        down()
        up()

    seconds = _seconds({"down": down, "up": up, "both": both}, device)
    return {f"{name}_gb_per_s": host[0].nbytes / took / 1e9 for name, took in seconds.items()}


def _copy(target: Tensor, source: Tensor, stream: Any) -> None:
    if stream is None:
        target.copy_(source)
        return
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def _seconds(calls: dict[str, Callable[[], None]], device: Device) -> dict[str, float]:
    """Returns median seconds per call, with calls in turn and one wait for the device per sample."""

    def contestant(name: str, call: Callable[[], None]) -> Contestant:
        def seconds(repeats: int) -> float:
            device.synchronize()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            device.synchronize()
            return (time.perf_counter() - began) / repeats

        return Contestant(name, "", 0.0, seconds)

    samples = interleave([contestant(name, call) for name, call in calls.items()], _ROUNDS)
    return {one.contestant.name: one.median for one in samples.values()}


def measure_adam(numel: int, seconds: float, threads: list[int] | None = None) -> dict[str, Any]:
    """Runs `python -m benchmarks.adam` with the best instruction set and the optimizer's number of threads.

    ``threads``: these numbers instead, as far as there are processors.
    """
    most = len(worker_cpus(None))
    counts = [count for count in threads or () if count <= most] or [len(worker_cpus(None, beside_device=True))]
    rows = []
    for count in counts:  # the last one with all operations
        only = () if count == counts[-1] else ("step", "journaled")
        rows += measure(numel, count, [kernels.available_isas()[-1]], seconds if not only else 2.0, only=only)
    steps = {row["threads"]: row["seconds_median"] / numel for row in rows if row["name"] == "step"}
    by_threads = {str(count): steps[count] for count in counts}
    return {"threads": counts[-1], "step_seconds_per_param": steps[counts[-1]], "by_threads": by_threads, "rows": rows}


def compile_deepspeed_kernel() -> dict[str, Any]:
    """Compiles DeepSpeed's CPU kernel, which it does at first use, so that no row's time includes it."""
    from benchmarks.gpu_suite.contestants import prepare_deepspeed

    prepare_deepspeed("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=True)
    return {"seconds": time.perf_counter() - began}
