"""Computes where the elements of a part lie in the whole tensor and which another part shares, without copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """Selects a run of ``length`` elements from ``first`` on in each of ``rows`` rows of ``period`` elements."""

    rows: int
    period: int
    first: int
    length: int

    @property
    def numel(self) -> int:
        return self.rows * self.length

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields elements ``begin`` to ``end`` of the part as (position in the part, position in the whole, count)."""
        while begin < end:
            row, within = divmod(begin, self.length)
            count = min(self.length - within, end - begin)
            yield begin, row * self.period + self.first + within, count
            begin += count

    def among(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields the part's elements among ``begin`` to ``end`` of the whole, in the form of ``runs``."""
        if begin >= end:
            return
        for row in range(begin // self.period, -(-end // self.period)):
            start = row * self.period + self.first
            low, high = max(begin, start), min(end, start + self.length)
            if low < high:
                yield row * self.length + low - start, low, high - low

    def may_share(self, other: Cut) -> bool:
        """Returns whether the two parts may share an element."""
        if (self.rows, self.period) != (other.rows, other.period):
            return True
        return self.first < other.first + other.length and other.first < self.first + self.length


def cut_of(shape: Sequence[int], dim: int, start: int, length: int, flat: bool) -> Cut:
    """Returns the cut of ``length`` indices from ``start`` of dimension ``dim``, or of the flat tensor if ``flat``."""
    if flat or not shape:
        return Cut(1, math.prod(shape), start, length)
    inner = math.prod(shape[dim + 1 :])
    return Cut(math.prod(shape[:dim]), shape[dim] * inner, start * inner, length * inner)


def shared(part: Cut, other: Cut, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields what ``part`` shares with ``other`` from ``begin`` to ``end``: (place in part, in other, count)."""
    if part == other:
        yield begin, begin, end - begin
        return
    for at, whole, count in part.runs(begin, end):
        for there, found, length in other.among(whole, whole + count):
            yield at + found - whole, there, length
