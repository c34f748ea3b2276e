"""Boxes of parameters, for tests of the noise that is keyed by the place of an element in the whole parameter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from superoffload.distributed.ownership import Box


class PlacedBox(NamedTuple):
    """A box of a parameter, how the kernels are told of it, and where its elements are, found by indexing."""

    shape: tuple[int, ...]
    box: Box
    order: tuple[int, ...] | None
    start: int
    axes: tuple[tuple[int, int], ...]
    places: npt.NDArray[np.uint64]

    def __str__(self) -> str:
        return f"{self.box.lengths}-of-{self.shape}" + (f"-{self.order}" if self.order else "")


def placed(
    shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...], order: tuple[int, ...] | None = None
) -> PlacedBox:
    box = Box(offsets, lengths)
    whole = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    flat = (part if order is None else part.transpose(order)).ravel()
    return PlacedBox(shape, box, order, box.first_in(shape), box.axes_in(shape, order), flat)


# Columns, with rows around the lengths of vectors and blocks; several dimensions; other orders in memory.
BOXES = (
    placed((700, 9), (0, 3), (700, 3)),
    placed((300, 16), (7, 4), (200, 12)),
    placed((150, 64), (0, 32), (150, 16)),
    placed((150, 64), (3, 16), (140, 17)),
    placed((5, 3000), (0, 1100), (5, 1000)),
    placed((4, 2600), (1, 0), (3, 1024)),
    placed((2100, 4), (0, 2), (2100, 1)),
    placed((900, 8), (200, 0), (400, 8)),
    placed((6, 40, 33), (2, 5, 0), (4, 30, 33)),
    placed((12, 20, 50), (0, 4, 10), (12, 11, 21)),
    placed((6, 7, 8, 9), (1, 2, 3, 4), (5, 4, 5, 4)),
    placed((8, 6, 9, 11), (0, 0, 0, 0), (8, 6, 9, 11), (0, 2, 3, 1)),
    placed((50, 61), (0, 0), (50, 61), (1, 0)),
)
