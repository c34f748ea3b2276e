"""Where the elements of a part are in the whole tensor, and which of them another part has too: by runs, no copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A run of ``length`` elements from ``first`` on in each of ``rows`` rows of ``period`` elements of a tensor."""

    rows: int
    period: int
    first: int
    length: int

    @property
    def numel(self) -> int:
        return self.rows * self.length

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Elements ``begin`` to ``end`` of the part: (where in the part, where in the whole, how many)."""
        while begin < end:
            row, within = divmod(begin, self.length)
            count = min(self.length - within, end - begin)
            yield begin, row * self.period + self.first + within, count
            begin += count

    def among(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Elements of the part that are ``begin`` to ``end`` of the whole: as ``runs``."""
        if begin >= end:
            return
        for row in range(begin // self.period, -(-end // self.period)):
            start = row * self.period + self.first
            low, high = max(begin, start), min(end, start + self.length)
            if low < high:
                yield row * self.length + low - start, low, high - low

    def may_share(self, other: Cut) -> bool:
        """Whether any element can be in both."""
        if (self.rows, self.period) != (other.rows, other.period):
            return True
        return self.first < other.first + other.length and other.first < self.first + self.length


def cut_of(shape: Sequence[int], dim: int, start: int, length: int, flat: bool) -> Cut:
    """``length`` indices from ``start`` of dimension ``dim``, or of the flat tensor if ``flat``."""
    if flat or not shape:
        return Cut(1, math.prod(shape), start, length)
    inner = math.prod(shape[dim + 1 :])
    return Cut(math.prod(shape[:dim]), shape[dim] * inner, start * inner, length * inner)


def shared(part: Cut, other: Cut, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Of elements ``begin`` to ``end`` of ``part``, those in ``other``: (where in part, where in other, how many)."""
    if part == other:
        yield begin, begin, end - begin
        return
    for at, whole, count in part.runs(begin, end):
        for there, found, length in other.among(whole, whole + count):
            yield at + found - whole, there, length
