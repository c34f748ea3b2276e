"""What an engine is made with, and what it needs of worker threads and clocks: both can be virtual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from superoffload import _native
from superoffload.engine.schedule import Schedule


class Pool(Protocol):
    """What an engine asks of ``_native.WorkerPool``; benchmarks/emulation has one without threads."""

    def submit(
        self,
        work: _native.BucketWork,
        operation: _native.Operation,
        width: int = 1,
        after: _native.Completion | None = None,
    ) -> _native.Completion: ...
    def withdraw(self, done: _native.Completion) -> bool: ...
    def close(self) -> None: ...
    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def inject_fault(self, chunks_until: int, message: str) -> None: ...
    @property
    def busy_seconds(self) -> float: ...


@dataclass(frozen=True)
class EngineOptions:
    """``bucket_numel`` None: a 32nd of the parameters, within 64 Ki and 32 Mi elements. ``cpus``: one per thread.

    ``two_phase``: the schedule may publish first and settle behind the next forward; whoever reads or writes masters,
    moments or (with gradients in place) gradients then calls ``Engine.settle()`` before. ``schedule``: instead of the
    one that ``speculation`` names. ``clock`` and ``pool``: others than real time and real threads.
    """

    speculation: str
    bucket_numel: int | None
    cpus: Sequence[int]
    two_phase: bool = False
    schedule: Schedule | None = None
    clock: Callable[[], float] = _native.now_seconds
    pool: Pool | None = None

    def make_pool(self) -> Pool:
        return self.pool if self.pool is not None else _native.WorkerPool(list(self.cpus))

    def make_schedule(self) -> Schedule:
        return self.schedule if self.schedule is not None else Schedule(self.speculation)
