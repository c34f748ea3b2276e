"""Which processors the worker threads use."""

from __future__ import annotations

import os

from superoffload.errors import ArgumentError


def allowed_cpus() -> list[int]:
    """The processors this process may run on (taskset, cgroup cpusets, SLURM), in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def worker_cpus(threads: int | None) -> list[int]:
    """One entry per worker thread: the processor it is bound to, or -1 where there are more threads than those."""
    allowed = allowed_cpus()
    if threads is None:
        return allowed
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ArgumentError(f"threads={threads!r}: expected a whole number of at least 1, or None for one per core")
    return allowed[:threads] + [-1] * (threads - len(allowed))
