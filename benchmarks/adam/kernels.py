"""Measures for `python -m benchmarks.adam` every operation of every instruction set against the machine's own limit.

Three parts: all operations on arrays far larger than the caches, with all threads and with one; how time grows with
size and threads; and the same job done by peers. Everything in one table is interleaved (timing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.adam import contestants as who
from benchmarks.adam.accuracy import accuracy_table
from benchmarks.timing import Contestant, Rounds, Samples, interleave
from benchmarks.workload import (
    BYTES_PER_PARAM,
    PEER_BYTES_PER_PARAM,
    Workload,
    journal_figures,
)
from superoffload import _native, kernels
from superoffload.errors import ArgumentError

Row = dict[str, Any]
Progress = Callable[[str], None]

_ACCURACY_NUMEL = 1 << 18


@dataclass(frozen=True)
class AdamBenchmark:
    """Holds settings. `numel`: elements of the large arrays; `sizes`: of the growth curves; `seconds`: per table."""

    numel: int
    sizes: Sequence[int]
    threads: Sequence[int]
    isas: Sequence[str]
    seconds: float
    with_deepspeed: bool = True


def check_memory(name: str, numel: int, available: int | None) -> None:
    """Raises ArgumentError, with the option's name, if arrays of `numel` elements would not fit into memory."""
    needed = int(numel * (BYTES_PER_PARAM + PEER_BYTES_PER_PARAM))
    if available is not None and needed > 0.8 * available:
        raise ArgumentError(
            f"{name}={numel}: its arrays take {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free; "
            "choose fewer"
        )


def run_adam(settings: AdamBenchmark, progress: Progress) -> dict[str, Any]:
    """Runs all parts; returns `limit`, `rows`, `journal`, `accuracy`, `peers` for the report."""
    rows: list[Row] = []
    limit: Row = {}
    journal: Row = {}
    deepspeed, peers = _find_deepspeed(settings.with_deepspeed, progress)
    before = kernels.current_isa()
    torch_threads = torch.get_num_threads()
    try:
        for threads in sorted({1, max(settings.threads)}, reverse=True):
            progress(f"all operations, {settings.numel:,} elements, {threads} threads")
            table = _Table(settings.numel, threads, settings.isas, deepspeed)
            measured = table.measure(Rounds(5, 200, settings.seconds))
            rows += measured
            if threads == max(settings.threads):
                limit, journal = table.limit_facts(measured), table.journal_facts()
        for numel, threads in _grid(settings):
            progress(f"step, {numel:,} elements, {threads} threads")
            rows += _Table(numel, threads, settings.isas[-1:], None, only=("step", "journaled")).measure(
                Rounds(5, 200, min(2.0, settings.seconds))
            )
        progress("accuracy of one step")
        accuracy = accuracy_table(_ACCURACY_NUMEL, deepspeed)
    finally:
        kernels.set_isa(before)
        torch.set_num_threads(torch_threads)
    return {"limit": limit, "rows": rows, "journal": journal, "accuracy": accuracy, "peers": peers}


def _grid(settings: AdamBenchmark) -> list[tuple[int, int]]:
    """Returns sizes with all threads and thread counts with the large arrays, without the corners measured already."""
    most = max(settings.threads)
    sizes = [(numel, most) for numel in settings.sizes if numel != settings.numel]
    return sizes + [(settings.numel, threads) for threads in settings.threads if threads not in (1, most)]


def _find_deepspeed(wanted: bool, progress: Progress) -> tuple[Any | None, dict[str, str]]:
    peers = {"torch.optim.AdamW(fused=True)": f"torch {torch.__version__}"}
    if not wanted:
        return None, {**peers, "DeepSpeedCPUAdam": "left out (--no-deepspeed)"}
    progress("DeepSpeedCPUAdam; its kernel compiles at first use, in a minute or more")
    try:
        found = who.load_deepspeed()
    except who.PeerMissing as missing:
        return None, {**peers, "DeepSpeedCPUAdam": str(missing)}
    import deepspeed

    return found, {**peers, "DeepSpeedCPUAdam": f"deepspeed {deepspeed.__version__}"}


class _Table:
    """Times one size and thread count: limits, our operations, peers."""

    def __init__(
        self, numel: int, threads: int, isas: Sequence[str], deepspeed: Any | None, only: Sequence[str] | None = None
    ) -> None:
        from superoffload.host.processors import allowed_cpus

        self._numel, self._threads = numel, threads
        cpus = allowed_cpus()[:threads]
        torch.set_num_threads(threads)
        self._pool = _native.WorkerPool(cpus)
        self._workload = Workload(numel, self._pool)
        limits, self._limits = who.limits(self._workload, cpus)
        contestants = list(limits)
        for isa in isas:
            contestants += who.OurKernels(self._workload, self._pool, isa).contestants(self._bytes_of)
        if only is not None:
            names = {*only, *map(who.limit_name, only)}
            contestants = [contestant for contestant in contestants if contestant.name in names]
        else:
            contestants += self._peers(deepspeed)
        self._contestants = contestants
        self._isas = isas

    def _peers(self, deepspeed: Any | None) -> list[Contestant]:
        peers = who.torch_peer(self._workload).contestants((who.TORCH_STEP, who.TORCH_JOB), self._workload)
        if deepspeed is not None:
            peer = who.deepspeed_peer(deepspeed, self._workload)
            peers += peer.contestants((who.DEEPSPEED_STEP, who.DEEPSPEED_JOB), self._workload)
        return peers

    def _bytes_of(self, row: str) -> float:
        return self._limits[row].bytes_per_param

    def measure(self, rounds: Rounds) -> list[Row]:
        try:
            samples = interleave(self._contestants, rounds)
        finally:
            self._pool.close()
        return [self._row(one, samples) for one in samples.values()]

    def _row(self, one: Samples, samples: dict[tuple[str, str], Samples]) -> Row:
        contestant = one.contestant
        limit = samples.get((who.limit_name(contestant.name), ""))
        # A peer's ratio is to our step with the best instruction set; ours to the same set's plain step.
        base = samples[("step", contestant.isa or self._isas[-1])]
        bytes_moved = contestant.bytes_per_param * self._numel
        return {
            "name": contestant.name,
            "isa": contestant.isa,
            "threads": self._threads,
            "numel": self._numel,
            "seconds_median": one.median,
            "seconds_min": one.minimum,
            "samples": len(one.seconds),
            "bytes_per_param": contestant.bytes_per_param,
            "gb_per_s": bytes_moved / one.median / 1e9,
            "of_limit": limit.ratio_to(one) if limit is not None else None,
            "ratio_to": f"step {base.contestant.isa}",
            "ratio": one.ratio_to(base),
        }

    def limit_facts(self, rows: Sequence[Row]) -> Row:
        """Returns the limit of a plain step, and the way that reaches it."""
        name = who.limit_name("step")
        row = next(row for row in rows if row["name"] == name)
        return {"name": name, "gb_per_s": row["gb_per_s"], "seconds_median": row["seconds_median"]} | {
            "how": {row_name: limit.way.describe() for row_name, limit in self._limits.items()}
        }

    def journal_facts(self) -> Row:
        """Returns figures of the arrays' last journaled step with one-byte codes."""
        work = self._workload.next_work()
        if not work.run_all(_native.Operation.step_journaled, 1):
            return {}
        return dict(journal_figures(work, self._numel))
