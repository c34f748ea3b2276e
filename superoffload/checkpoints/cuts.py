"""Computes where the elements of a box lie in the whole tensor and which another box shares, without copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from superoffload.distributed.boxes import Box


@dataclass(frozen=True)
class Cut:
    """Selects ``lengths[d]`` indices from ``offsets[d]`` on in each dimension of a contiguous tensor of ``shape``.

    No dimension but the first is whole, so that each row of the last one is one run of elements. Boxes of tensors of
    different shapes with the same elements can be compared.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields elements ``begin`` to ``end`` of the part as (position in the part, position in the whole, count)."""
        width = self.lengths[-1]
        while begin < end:
            row, within = divmod(begin, width)
            count = min(width - within, end - begin)
            yield begin, self._place(row) + within, count
            begin += count

    def among(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields the part's elements among ``begin`` to ``end`` of the whole, in the form of ``runs``."""
        if begin >= end:
            return
        period, width = self.shape[-1], self.lengths[-1]
        for row in range(begin // period, -(-end // period)):
            own = self._own_row(row)
            start = row * period + self.offsets[-1]
            low, high = max(begin, start), min(end, start + width)
            if own is not None and low < high:
                yield own * width + low - start, low, high - low

    def may_share(self, other: Cut) -> bool:
        """Returns whether the two parts may share an element."""
        if not (self.numel and other.numel):
            return False
        if self.shape == other.shape:
            return all(map(_overlap, self.offsets, self.lengths, other.offsets, other.lengths))
        (first, last), (begin, end) = self.span(), other.span()
        return first < end and begin < last

    def span(self) -> tuple[int, int]:
        """Returns the places in the whole of the first element and after the last one."""
        rows = self.numel // self.lengths[-1]
        return self._place(0), self._place(rows - 1) + self.lengths[-1]

    def _place(self, row: int) -> int:
        """Returns the place in the whole of the first element of one of the part's rows."""
        place, step = self.offsets[-1], self.shape[-1]
        for size, offset, length in self._outer():
            row, index = divmod(row, length)
            place += (offset + index) * step
            step *= size
        return place

    def _own_row(self, row: int) -> int | None:
        """Returns which of the part's rows is in this row of the whole; None if it has none there."""
        own, step = 0, 1
        for size, offset, length in self._outer():
            row, index = divmod(row, size)
            if not offset <= index < offset + length:
                return None
            own += (index - offset) * step
            step *= length
        return own

    def _outer(self) -> Iterator[tuple[int, int, int]]:
        """Yields size, offset and length of all dimensions but the last, from the inner to the outer ones."""
        return zip(self.shape[-2::-1], self.offsets[-2::-1], self.lengths[-2::-1], strict=True)


def _overlap(offset: int, length: int, other: int, others: int) -> bool:
    return offset < other + others and other < offset + length


def cut_of(shape: Sequence[int], box: Box) -> Cut:
    """Returns the cut of ``box`` from a tensor of ``shape``, with whole dimensions joined to those before them."""
    dims: list[tuple[int, int, int]] = []
    for size, offset, length in zip(shape, box.offsets, box.lengths, strict=True):
        if dims and length == size:
            outer, start, count = dims[-1]
            dims[-1] = outer * size, start * size, count * size
        else:
            dims.append((size, offset, length))
    sizes, offsets, lengths = zip(*dims or [(1, 0, 1)], strict=True)
    return Cut(sizes, offsets, lengths)


def shared(part: Cut, other: Cut, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields what ``part`` shares with ``other`` from ``begin`` to ``end``: (place in part, in other, count)."""
    if part == other:
        yield begin, begin, end - begin
        return
    for at, whole, count in part.runs(begin, end):
        for there, found, length in other.among(whole, whole + count):
            yield at + found - whole, there, length
