"""Readers of an earlier state, such as a checkpoint that is still being written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from superoffload.bucket import Shard
    from superoffload.checkpoints.snapshot import Snapshot


class Snapshots:
    """Holds them weakly, in ``open``: one whose save has been cut off is gone by itself."""

    def __init__(self) -> None:
        self.open: WeakSet[Snapshot] = WeakSet()

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self.open))

    def add(self, snapshot: Snapshot) -> None:
        self.open.add(snapshot)

    def clear(self) -> None:
        self.open.clear()

    def protect(self, shards: Iterable[Shard]) -> None:
        """Before masters or moments of ``shards`` change: every snapshot has read or copied them when it returns."""
        if not self.open:
            return
        changing = list(shards)
        for snapshot in self:
            snapshot.protect(changing)
            if snapshot.over:
                self.open.discard(snapshot)
