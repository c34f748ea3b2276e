"""Measures how fast memory can be: the fastest walk that only loads and stores the same arrays as a kernel.

The fastest way (vector width, how long to stay with one array before the next, stores past the cache) differs between
machines and array sizes, so this tries a few and takes the best as the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from benchmarks.bandwidth.walks import Access, Stream, memory_loops, walk_memory

READ, WRITE, UPDATE = Access.read, Access.write, Access.update

_BLOCKS = (64, 256, 1024)
_LARGEST_TRIAL = 1 << 24  # elements: beyond every cache, so larger arrays prefer the same way
_TRIALS = 3

# How each operation accesses master and moments, the packed gradient, the shadow and the journal's codes.
_TRAFFIC: Mapping[str, tuple[Access, Access, Access | None, Access | None]] = {
    "step": (UPDATE, READ, WRITE, None),
    "journaled": (UPDATE, READ, WRITE, WRITE),
    "undo": (UPDATE, READ, None, READ),
    "replay": (UPDATE, READ, WRITE, READ),
    "publish": (READ, READ, WRITE, None),
    "reading": (READ, READ, None, None),  # what publish reads, without writes
}
# The same where the shadow is the upper half of a split master; publish keeps the old one in two bytes of the journal.
_SPLIT_TRAFFIC = {
    "step": (UPDATE, READ, UPDATE, None),
    "journaled": (UPDATE, READ, UPDATE, WRITE),
    "undo": (UPDATE, READ, UPDATE, READ),
    "replay": (UPDATE, READ, UPDATE, READ),
    "publish": (READ, READ, UPDATE, WRITE),
    "reading": (READ, READ, READ, None),
}
_HALF_BYTES = 2


class Buffer(Protocol):
    """Describes the memory of a torch tensor."""

    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def numel(self) -> int: ...


@dataclass(frozen=True)
class Arrays:
    """Holds the arrays that the operations walk over; `codes` has two bytes per element."""

    master: Buffer
    exp_avg: Buffer
    exp_avg_sq: Buffer
    gradient: Buffer
    shadow: Buffer
    codes: Buffer
    split: bool = False  # the master is: it has two bytes per element, and the shadow the others


@dataclass(frozen=True)
class Way:
    """Describes how to walk; see benchmarks/bandwidth/traversal.h."""

    loops: str
    block: int
    streaming_stores: bool

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def all_ways() -> list[Way]:
    loops = memory_loops()
    return [
        Way(name, block, streaming)
        for name in dict.fromkeys((loops[0], loops[-1]))
        for block in _BLOCKS
        for streaming in (False, True)
    ]


def streams_of(operation: str, width: int, arrays: Arrays) -> tuple[list[Stream], float]:
    """Returns the arrays an operation touches, and the bytes it moves per parameter; `width` in bytes per code."""
    state, gradient, shadow, codes = (_SPLIT_TRAFFIC if arrays.split else _TRAFFIC)[operation]
    if arrays.split and operation == "publish":
        width = _HALF_BYTES
    parts = [(arrays.master, state), (arrays.exp_avg, state), (arrays.exp_avg_sq, state), (arrays.gradient, gradient)]
    if shadow is not None:
        parts.append((arrays.shadow, shadow))
    sizes = [(array, array.element_size(), access) for array, access in parts]
    if codes is not None:
        sizes.append((arrays.codes, width, codes))
    streams = [Stream(array.data_ptr(), size, access) for array, size, access in sizes]
    return streams, float(sum(size * (2 if access is UPDATE else 1) for _, size, access in sizes))


class MemoryLimit:
    """Measures the limit of one operation on given arrays and processors; leaves state and gradient unchanged."""

    def __init__(self, operation: str, width: int, arrays: Arrays, cpus: Sequence[int]) -> None:
        self._streams, self.bytes_per_param = streams_of(operation, width, arrays)
        self._numel = arrays.master.numel()
        self._cpus = list(cpus)
        self.way = self._best_way()

    def _best_way(self) -> Way:
        numel = min(self._numel, _LARGEST_TRIAL)
        repeats = max(1, (1 << 18) // numel)
        ways = all_ways()
        best = {way: float("inf") for way in ways}
        for _ in range(_TRIALS):
            for way in ways:
                best[way] = min(best[way], self._walk(way, numel, repeats))
        return min(ways, key=best.__getitem__)

    def _walk(self, way: Way, numel: int, repeats: int) -> float:
        seconds = walk_memory(self._streams, numel, way.block, way.loops, way.streaming_stores, self._cpus, repeats)
        return seconds / repeats

    def seconds(self, repeats: int = 1) -> float:
        """Returns mean seconds of one walk over everything."""
        return self._walk(self.way, self._numel, repeats)
