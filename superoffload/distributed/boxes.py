"""A box is what a rank owns of a tensor: a run of indices in each dimension."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """Selects ``lengths[d]`` indices from ``offsets[d]`` on in each dimension d."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Selects all of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the box's elements of ``tensor``, as a view."""
        for dim, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, length)
        return tensor

    def first_in(self, shape: Sequence[int]) -> int:
        """Returns the place of the box's first element in a contiguous, flat tensor of ``shape``."""
        place = 0
        for offset, size in zip(self.offsets, shape, strict=True):
            place = place * size + offset
        return place

    def axes_in(self, shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
        """Returns how the box's elements, in the order of its dimensions or in ``order``, lie in such a flat tensor.

        Each axis is (length, stride), the innermost first. Returns () where the elements follow one another.
        """
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        axes: list[tuple[int, int]] = []
        for dim in reversed(range(len(shape)) if order is None else order):
            length, stride = self.lengths[dim], strides[dim]
            if axes and stride == axes[-1][0] * axes[-1][1]:
                axes[-1] = (axes[-1][0] * length, axes[-1][1])
            elif length > 1:
                axes.append((length, stride))
        return () if self.numel == 0 or axes in ([], [(self.numel, 1)]) else tuple(axes)

    def within(self, outer: Box) -> Box | None:
        """Returns the box as a part of ``outer``'s elements; None if it is not inside of ``outer``."""
        offsets = tuple(mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True))
        ends = [offset + length for offset, length in zip(offsets, self.lengths, strict=True)]
        inside = all(o >= 0 for o in offsets) and all(e <= n for e, n in zip(ends, outer.lengths, strict=True))
        return Box(offsets, self.lengths) if inside else None


class Misfit(NamedTuple):
    """Says where ``boxes`` leave a gap or overlap."""

    what: str
    boxes: tuple[Box, ...]


def misfit(shape: Sequence[int], boxes: Iterable[Box]) -> Misfit | None:
    """Finds where different boxes do not have each element of ``shape`` once; None if they do.

    Along each dimension the boxes that are equal in the dimensions before must follow one another, as those that a mesh
    of ranks cuts do. Empty boxes have no element and do not count.
    """
    return _misfit(shape, [box for box in boxes if box.numel], 0) if math.prod(shape) else None


def _misfit(shape: Sequence[int], boxes: Sequence[Box], dim: int) -> Misfit | None:
    if dim == len(shape):
        return None if len(boxes) == 1 else Misfit("the same elements are in different parts", tuple(boxes))
    runs: defaultdict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        runs[box.offsets[dim], box.lengths[dim]].append(box)
    end, last = 0, tuple[Box, ...]()
    for (offset, length), members in sorted(runs.items()):
        if offset != end:
            what = f"indices {end} to {offset - 1} of dimension {dim} are in no part"
            if offset < end:
                what = f"index {offset} of dimension {dim} is in several parts"
            return Misfit(what, (*last, members[0]))
        found = _misfit(shape, members, dim + 1)
        if found is not None:
            return found
        end, last = offset + length, (members[0],)
    if end != shape[dim]:
        return Misfit(f"indices {end} to {shape[dim] - 1} of dimension {dim} are in no part", last)
    return None
