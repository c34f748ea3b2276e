"""Measures every operation of every instruction set against the machine's own limit, torch's fused AdamW and DeepSpeed.

Three parts: all operations on arrays far larger than the caches, with all threads and with one; how time grows with
size and threads; and the same job done by peers. Everything in one table is interleaved (timing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.adam.accuracy import accuracy_table
from benchmarks.adam.peers import PeerMissing, load_deepspeed
from benchmarks.bandwidth.limit import MemoryLimit
from benchmarks.timing import Contestant, Rounds, Samples, interleave, timed
from benchmarks.workload import BETAS, BYTES_PER_PARAM, EPS, LR, WEIGHT_DECAY, Workload
from superoffload import _native, kernels
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.host.processors import allowed_cpus
from superoffload.host.system import System, usable_memory

Operation = _native.Operation
Row = dict[str, Any]

# name of the row: operation for the memory limit, bytes per code
OPERATIONS = {
    "step": ("step", 1),
    "journaled": ("journaled", 1),
    "journaled, 2-byte codes": ("journaled", 2),
    "undo": ("undo", 1),
    "replay": ("replay", 1),
    "publish": ("publish", 1),
}
READING = "publish, reading alone"  # has a limit only
STEP, JOB = "{} step", "{}, same job"
TORCH, DEEPSPEED = "torch fused", "DeepSpeedCPUAdam"
OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
_ACCURACY_NUMEL = 1 << 18


def check_memory(numel: int, bytes_per_param: float = BYTES_PER_PARAM) -> None:
    """Raises if arrays of `numel` elements would not fit into memory."""
    needed, available = numel * bytes_per_param, usable_memory(System())
    if available is not None and needed > 0.8 * available:
        raise ArgumentError(
            f"{numel} elements take {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free; choose fewer"
        )


def run_adam(
    numel: int, sizes: Sequence[int], threads: Sequence[int], isas: Sequence[str], seconds: float, *,
    with_deepspeed: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Runs all parts; returns `limit`, `rows`, `accuracy`, `peers` for the report.

    `numel`: elements of the large arrays; `sizes`: of the growth curves; `seconds`: per table.
    """
    rows: list[Row] = []
    limit: Row = {}
    deepspeed, state = None, "left out"
    if with_deepspeed:
        try:
            deepspeed, state = load_deepspeed(), f"deepspeed {version('deepspeed')}"
        except PeerMissing as missing:
            state = str(missing)
    before, torch_threads = kernels.current_isa(), torch.get_num_threads()
    most = max(threads)
    try:
        for count in sorted({1, most}, reverse=True):
            table = _Table(numel, count, isas, deepspeed)
            measured = table.measure(seconds)
            rows += measured
            if count == most:
                limit = table.limit(measured)
        grid = [(size, most) for size in sizes if size != numel]
        grid += [(numel, count) for count in threads if count not in (1, most)]
        for size, count in grid:
            rows += _Table(size, count, isas[-1:], None, only=("step", "journaled")).measure(min(2.0, seconds))
        accuracy = accuracy_table(_ACCURACY_NUMEL, deepspeed)
    finally:
        kernels.set_isa(before)
        torch.set_num_threads(torch_threads)
    peers = {"torch.optim.AdamW(fused=True)": f"torch {torch.__version__}", DEEPSPEED: state}
    return {"limit": limit, "rows": rows, "accuracy": accuracy, "peers": peers}


class _Table:
    """Times one size and thread count: limits, our operations, peers."""

    def __init__(
        self, numel: int, threads: int, isas: Sequence[str], deepspeed: Any | None, only: Sequence[str] = ()
    ) -> None:
        self._numel, self._threads, self._isas = numel, threads, isas
        cpus = allowed_cpus()[:threads]
        torch.set_num_threads(threads)
        self._pool = _native.WorkerPool(cpus)
        self._workload = workload = Workload(numel, self._pool)
        contestants, self._limits = limits(workload, cpus)
        for isa in isas:
            contestants += our_kernels(workload, self._pool, isa, self._limits)
        if only:
            names = {*only, *map(limit_name, only)}
            contestants = [contestant for contestant in contestants if contestant.name in names]
        else:
            step = torch.tensor(float(workload.step))
            contestants += _peer(TORCH, torch.optim.AdamW, workload, step, fused=True)
            if deepspeed is not None:
                contestants += _peer(DEEPSPEED, deepspeed, workload, workload.step, adamw_mode=True)
        self._contestants = contestants

    def measure(self, seconds: float) -> list[Row]:
        try:
            samples = interleave(self._contestants, Rounds(5, 200, seconds))
        finally:
            self._pool.close()
        rows = []
        for one in samples.values():
            # A peer's ratio is to our step with the best instruction set; ours to the same set's plain step.
            base = samples[("step", one.contestant.isa or self._isas[-1])]
            limit = samples.get((limit_name(one.contestant.name), ""))
            rows.append(row_of(one, self._threads, self._numel, limit, base, f"step {base.contestant.isa}"))
        return rows

    def limit(self, rows: Sequence[Row]) -> Row:
        """Returns the limit of a plain step with the ways that reach the limits."""
        step = next(row for row in rows if row["name"] == limit_name("step"))
        how = {name: limit.way._asdict() for name, limit in self._limits.items()}
        return {**{key: step[key] for key in ("name", "gb_per_s", "seconds_median")}, "how": how}


def row_of(one: Samples, threads: int, numel: int, limit: Samples | None, base: Samples | None, ratio_to: str) -> Row:
    moved = one.contestant.bytes_per_param
    return {
        "name": one.contestant.name,
        "isa": one.contestant.isa,
        "threads": threads,
        "numel": numel,
        "seconds_median": one.median,
        "seconds_min": one.minimum,
        "samples": len(one.seconds),
        "bytes_per_param": moved,
        "gb_per_s": moved * numel / one.median / 1e9,
        "of_limit": limit.ratio_to(one) if limit is not None else None,
        "ratio_to": ratio_to,
        "ratio": one.ratio_to(base) if base is not None else None,
    }


# ---- contestants ----------------------------------------------------------------------------------------------------


def limit_name(row: str) -> str:
    return f"limit of {row}"


def limits(workload: Workload, cpus: Sequence[int]) -> tuple[list[Contestant], dict[str, MemoryLimit]]:
    """Returns a contestant per row of ours, a walk over the same bytes, and one that only reads what publish reads."""
    operations = {**OPERATIONS, READING: ("reading", 1)}
    found = {row: MemoryLimit(*operation, workload, cpus) for row, operation in operations.items()}
    walks = [Contestant(limit_name(row), "", limit.bytes_per_param, limit.seconds) for row, limit in found.items()]
    return walks, found


def our_kernels(
    workload: Workload, pool: _native.WorkerPool, isa: str, limits: Mapping[str, MemoryLimit]
) -> list[Contestant]:
    """Returns the kernels of one instruction set, driven through the worker pool as the optimizer does."""

    def step() -> None:
        pool.submit(workload.next_work(), Operation.step).wait()

    def journaled(width: int = 1) -> None:
        work = workload.next_work()
        pool.submit(work, Operation.step_journaled, width).wait()
        if work.overflowed:
            raise SuperOffloadError(
                f"the journal of the benchmark's arrays overflowed (codes of {width} bytes): their gradients are not "
                "what training gives; this is a bug of the benchmark, please report it"
            )

    def undo() -> None:
        pool.submit(workload.current_work, Operation.undo).wait()
        workload.take_back()

    def replay() -> None:
        workload.freeze(gradient_factor=0.5)
        pool.submit(workload.current_work, Operation.replay).wait()

    def publish() -> None:
        pool.submit(workload.next_work(), Operation.publish).wait()

    def settle() -> None:
        pool.submit(workload.current_work, Operation.settle).wait()

    calls = {
        "step": timed(step),
        "journaled": timed(journaled),
        "journaled, 2-byte codes": timed(lambda: journaled(2)),
        "undo": timed(undo, prepare=journaled),
        "replay": timed(replay, prepare=journaled),
        "publish": timed(publish, finish=settle if workload.split else workload.take_back),
    }

    def with_isa(call: Callable[[int], float]) -> Callable[[int], float]:
        def seconds(repeats: int) -> float:
            kernels.set_isa(isa)
            return call(repeats)

        return seconds

    return [Contestant(row, isa, limits[row].bytes_per_param, with_isa(call)) for row, call in calls.items()]


def _peer(name: str, optimizer_class: Any, workload: Workload, step: Any, **options: Any) -> list[Contestant]:
    """Lays another library's optimizer over the workload's memory; ``step``: its step count, in its own form.

    The same job is from a bf16 gradient to a bf16 parameter, the bare step from an fp32 gradient to the master.
    """
    parameter = torch.nn.Parameter(workload.master)
    parameter.grad = gradient = workload.gradient.float()
    optimizer = optimizer_class([parameter], **OPTIONS, **options)
    optimizer.state[parameter] = {"step": step, "exp_avg": workload.exp_avg, "exp_avg_sq": workload.exp_avg_sq}

    def same_job() -> None:
        gradient.copy_(workload.gradient)
        optimizer.step()
        workload.shadow.copy_(workload.master)

    calls = {STEP: optimizer.step, JOB: same_job}
    return [Contestant(what.format(name), "", 28.0, timed(call), settles=True) for what, call in calls.items()]
