"""An engine is made with options, a listener that is told of events, and a recorder of its steps, such as a timeline.

Its worker threads and its clock can be virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from superoffload import _native
from superoffload.engine.schedule import Schedule

if TYPE_CHECKING:
    from superoffload.engine.bucket import Bucket, Shard
    from superoffload.engine.verdict import Verdict
    from superoffload.errors import SuperOffloadError
    from superoffload.links.base import Link


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
    ``two_phase`` allows to publish first and settle behind the next forward. Then call ``Engine.last_step.settle()``
    before you read or write masters, moments, or gradients that are not copied. ``schedule`` replaces the one that
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


def _ignored(*_: Any) -> None:
    """Ignores an event."""


@dataclass
class Listener:
    """Has what an engine calls at its events, which ignores them until it is replaced.

    An engine keeps its listener alive; a function refers to its owner weakly where the engine must not keep that alive.
    ``packed``: the link no longer needs the gradient of a shard, so its memory may be freed. ``making_way``: all
    buckets will be laid out anew, and their packed gradients will be lost. ``landing``: buckets that
    ``apply(later=True)`` has left will be delivered, except for pieces that are taken out of ``bucket.present`` now.
    ``landed``: they were; the engine raises what it returns once the delivery is complete.
    """

    packed: Callable[[Shard], None] = _ignored
    making_way: Callable[[], None] = _ignored
    landing: Callable[[Sequence[Bucket]], None] = _ignored
    landed: Callable[[Sequence[Bucket]], SuperOffloadError | None] = _ignored


class Recorder:
    """Records nothing. Subclasses record, and may wrap the engine's link and worker threads."""

    def follow(self, buckets: Callable[[], Sequence[Bucket]]) -> None:
        """Follows a new engine, whose buckets ``buckets`` returns. The engine before it has ended."""

    def wrap_link(self, link: Link) -> Link:
        """Returns the link that the engine uses instead of ``link``."""
        return link

    def wrap_pool(self, pool: Pool) -> Pool:
        """Returns the pool that the engine uses instead of ``pool``."""
        return pool

    def deciding(self) -> None:
        """Learns that the end of a step was asked for."""

    def decided(self, verdict: Verdict) -> None:
        """Learns the verdict."""

    def landed(self, buckets: Sequence[Bucket], began: float) -> None:
        """Learns that the training thread, since ``began``, waited for buckets left for later and delivered them."""

    def end_step(self, buckets: Sequence[Bucket]) -> None:
        """Learns that every bucket has its fate."""

    def close(self) -> None:
        """Ends the recording: no engine follows. Idempotent."""
