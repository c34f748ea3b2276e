"""An engine is made with these options. Its worker threads and its clock can be virtual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from superoffload import _native
from superoffload.engine.schedule import Schedule


class Pool(Protocol):
    """Declares what an engine uses of ``_native.WorkerPool``; benchmarks/emulation has a pool without threads."""

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
    """Holds the options of an engine.

    ``bucket_numel`` None means a 32nd of the parameters, within 64 Ki and 32 Mi elements. ``cpus`` has one per thread.
    ``two_phase`` allows to publish first and settle behind the next forward. Then call ``Engine.tail.settle()`` before
    you read or write masters, moments, or gradients that are not copied. ``schedule`` replaces the one that
    ``speculation`` names; ``clock`` and ``pool`` replace real time and real threads."""

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
