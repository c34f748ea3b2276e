"""Which processors the worker threads use."""

from __future__ import annotations

import os

from superoffload.arguments import check_whole_number


def allowed_cpus() -> list[int]:
    """The processors this process may run on (taskset, cgroup cpusets, SLURM), in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def worker_cpus(threads: int | None) -> list[int]:
    """One entry per worker thread: the processor it is bound to, or -1 where there are more threads than those."""
    check_whole_number("threads", threads)
    allowed = allowed_cpus()
    if threads is None:
        return allowed
    return allowed[:threads] + [-1] * (threads - len(allowed))
