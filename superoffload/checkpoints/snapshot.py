"""The state of one moment, read while later steps change it: what is about to change is read or copied before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from superoffload.bucket import Shard


@dataclass(frozen=True)
class ShardState:
    """Flat tensors; views of what is stepped, or copies."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.master, self.exp_avg, self.exp_avg_sq))

    def copy(self) -> ShardState:
        """In host memory."""
        return ShardState(*(t.to("cpu", copy=True) for t in (self.master, self.exp_avg, self.exp_avg_sq)))


def _state_of(shard: Shard) -> ShardState:
    """Of a resident shard a copy: other threads' reads are not ordered with the device's steps."""
    state = ShardState(shard.master, shard.exp_avg, shard.exp_avg_sq)
    return state.copy() if shard.resident else state


class Snapshot:
    """Shards as they are now. One thread calls ``read_all``, the training thread ``protect`` before it changes some.

    Copies take at most ``memory`` bytes at a time; beyond that ``protect`` waits until the shard has been read. Those
    of resident shards are made at once and count; where they are more, nothing else is copied until they are read.
    """

    def __init__(self, shards: Sequence[Shard], memory: int) -> None:
        self._states = {s.index: _state_of(s) for s in shards}
        self._waiting = deque(shard.index for shard in shards)  # not read yet
        self._apart = {shard.index for shard in shards if shard.resident}  # copied already
        self._copied: set[int] = set()
        self._urgent: deque[int] = deque()
        self.largest_extra = sum(self._states[index].nbytes for index in self._apart)  # bytes of copies at any time
        self._free = memory - self.largest_extra
        self._memory = memory
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
        if index in self._waiting and state.nbytes <= self._free:
            self._states[index] = state.copy()
            self._copied.add(index)
            self._free -= state.nbytes
            self.largest_extra = max(self.largest_extra, self._memory - self._free)
            return
        if index in self._waiting:
            self._urgent.append(index)
        self._changed.wait_for(lambda: self._over or index not in self._states)

    def read_all(self, read: Callable[[int, ShardState], None]) -> None:
        """Calls ``read(index, state)`` for every shard, the awaited ones first."""
        while (index := self._next()) is not None:
            read(index, self._states[index])
            self._done(index)

    def end(self) -> None:
        """Nothing is read any more, whether all was or not; nobody need wait."""
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
        """Whether everything was read."""
        return self._over

    def wait(self) -> None:
        """Until everything was read, or reading failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)
