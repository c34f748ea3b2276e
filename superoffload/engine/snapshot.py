"""A snapshot is the state of one moment, which a checkpoint reads while later steps change the shards.

A shard is read or copied before it changes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.host.signals import held_signals


@dataclass(frozen=True)
class ShardState:
    """Holds the flat state tensors of a shard, or copies of them."""

    master: Tensor  # of a split master the remainders
    exp_avg: Tensor
    exp_avg_sq: Tensor
    halves: tuple[Tensor, ...] = ()  # of a split master the upper ones, in runs

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.master, self.exp_avg, self.exp_avg_sq, *self.halves))

    def copy(self) -> ShardState:
        """Copies the state to host memory."""
        master, exp_avg, exp_avg_sq, *halves = (
            t.to("cpu", copy=True) for t in (self.master, self.exp_avg, self.exp_avg_sq, *self.halves)
        )
        return ShardState(master, exp_avg, exp_avg_sq, tuple(halves))


def _state_of(shard: Shard) -> ShardState:
    """Copies the state of a resident shard, since other threads' reads are not ordered with the device's steps."""
    halves = shard.upper.parts if shard.upper is not None else ()
    state = ShardState(shard.master, shard.exp_avg, shard.exp_avg_sq, halves)
    return state.copy() if shard.resident else state


class Snapshot:
    """Keeps shards as they are now. One thread calls ``read_all``; the training thread ``protect``, before changes.

    Copies take at most ``memory`` bytes at a time; beyond that ``protect`` waits until the shard has been read. Copies
    of resident shards are made at once and count; if they exceed ``memory``, nothing else is copied until they are
    read. With ``memory`` None this thread reads. Then only other threads and signal handlers call ``protect``. They
    copy instead of waiting, because the reading thread may wait for them.
    """

    def __init__(self, shards: Sequence[Shard], memory: int | None) -> None:
        self._reader = threading.get_ident() if memory is None else None
        self._states = {s.index: _state_of(s) for s in shards}
        self._waiting = deque(shard.index for shard in shards)  # not read yet
        self._apart = {shard.index for shard in shards if shard.resident}  # copied already
        self._copied: set[int] = set()
        self._urgent: deque[int] = deque()
        self.largest_extra = sum(self._states[index].nbytes for index in self._apart)  # bytes of copies at any time
        self._memory = memory or 0
        self._free = self._memory - self.largest_extra
        self._changed = threading.Condition()
        self._over = False

    def protect(self, shards: Iterable[Shard]) -> None:
        """Returns once the shards may be changed."""
        if self._over:
            return
        with self._changed:
            for shard in shards:
                self._protect(shard.index)

    def _protect(self, index: int) -> None:
        state = self._states.get(index)
        if state is None or index in self._copied or index in self._apart:
            return
        if index in self._waiting and (state.nbytes <= self._free or self._reader is not None):
            self._states[index] = state.copy()
            self._copied.add(index)
            self._free -= state.nbytes
            self.largest_extra = max(self.largest_extra, self._memory - self._free)
            return
        if index in self._waiting:
            self._urgent.append(index)
        elif self.is_read_here:  # the read of this shard was interrupted
            self.end()
            return
        self._changed.wait_for(lambda: self._over or index not in self._states)

    def read_all(self, read: Callable[[int, ShardState], None]) -> None:
        """Calls ``read(index, state)`` for every shard, awaited ones first. Signal handlers run between two shards."""
        while self._read_one(read):
            pass

    def _read_one(self, read: Callable[[int, ShardState], None]) -> bool:
        with held_signals():
            index = self._next()
            if index is not None:
                read(index, self._states[index])
                self._done(index)
        return index is not None

    def end(self) -> None:
        """Ends reading, whether all shards were read or not; waiting threads go on."""
        with self._changed:
            self._over = True
            self._states.clear()
            self._copied.clear()
            self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            while self._urgent:
                index = self._urgent.popleft()
                if index in self._waiting:
                    self._waiting.remove(index)
                    return index
            return self._waiting.popleft() if self._waiting else None

    def _done(self, index: int) -> None:
        with self._changed:
            state = self._states.pop(index)
            if index in self._copied or index in self._apart:
                self._copied.discard(index)
                self._apart.discard(index)
                self._free += state.nbytes
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Returns whether reading has ended."""
        return self._over

    @property
    def is_read_here(self) -> bool:
        """Returns whether the calling thread is the one that reads."""
        return self._reader == threading.get_ident()

    def wait(self) -> None:
        """Waits until all shards were read, or reading failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)


class Snapshots:
    """Holds the snapshots that are still read, weakly, in ``open``: one whose save was cut off is gone by itself."""

    def __init__(self) -> None:
        self.open: WeakSet[Snapshot] = WeakSet()

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self.open))

    def add(self, snapshot: Snapshot) -> None:
        self.open.add(snapshot)

    def protect(self, shards: Iterable[Shard]) -> None:
        """Has every snapshot read or copied ``shards`` before their masters or moments change."""
        if not self.open:
            return
        changing = list(shards)
        for snapshot in self:
            snapshot.protect(changing)
            if snapshot.over:
                self.open.discard(snapshot)
