"""Finds out, from the boxes of all ranks, which ranks own the same part of a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from superoffload.distributed.boxes import Box, misfit
from superoffload.errors import ArgumentError

Ranks = tuple[int, ...]
Pair = tuple[tuple[int, ...], tuple[int, ...]]  # the offsets and lengths of a box, as ranks tell them


@dataclass(frozen=True, eq=False)
class Partition:
    """Groups the ranks that have the same; each rank is in one group, ascending, and groups go by their first rank.

    An ``OwnersTable`` makes one object for equal groups, so that comparing two costs nothing.
    """

    groups: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_of", {rank: group for group in self.groups for rank in group})

    def of(self, rank: int) -> Ranks:
        """Returns the group of ``rank``."""
        groups: Mapping[int, Ranks] = vars(self)["_of"]
        return groups[rank]


@dataclass(frozen=True)
class Owners:
    """Knows for one parameter the boxes of all ranks. ``replicas``: the ranks that own the same elements, whose first
    one counts where elements must be counted once. A rank with an empty part is a group of its own."""

    boxes: tuple[Box, ...]  # by group
    replicas: Partition

    def parts(self) -> Iterator[tuple[int, Box]]:
        """Yields each box that is not empty with the first rank that owns it."""
        for box, group in zip(self.boxes, self.replicas.groups, strict=True):
            if box.numel:
                yield group[0], box

    def writer_of(self, rank: int) -> int | None:
        """Returns the rank that writes the part of ``rank`` to files: the first of those that own it. None if it is
        empty, unless the whole parameter is."""
        group = self.replicas.of(rank)
        if self.boxes[self.replicas.groups.index(group)].numel:
            return group[0]
        return None if any(box.numel for box in self.boxes) else self.replicas.groups[0][0]


class OwnersTable:
    """Makes the ``Owners`` of many parameters. Those that are cut alike share them: a model has a few shapes, and with
    a thousand ranks each costs milliseconds."""

    def __init__(self) -> None:
        self._partitions: dict[tuple[Ranks, ...], Partition] = {}
        self._known: dict[tuple[tuple[int, ...], Ranks, tuple[Pair, ...]], Owners] = {}

    def partition(self, groups: Sequence[Sequence[int]]) -> Partition:
        key = tuple(tuple(group) for group in groups)
        return self._partitions.setdefault(key, Partition(key))

    def apart(self, ranks: Ranks, told: Sequence[Pair]) -> Owners:
        """Returns the owners of parameters that are each rank's own."""
        return Owners(tuple(Box(*pair) for pair in told), self.partition([[rank] for rank in ranks]))

    def owners(self, name: str, shape: Sequence[int], ranks: Ranks, told: Sequence[Pair]) -> Owners:
        """Returns the owners of a parameter that ``ranks`` have, ascending; ``told``: the box of each.

        Raises ArgumentError if boxes overlap, or do not cover the parameter.
        """
        key = tuple(shape), ranks, tuple(told)
        if key not in self._known:
            self._known[key] = self._owners(name, shape, ranks, told)
        return self._known[key]

    def _owners(self, name: str, shape: Sequence[int], ranks: Ranks, told: Sequence[Pair]) -> Owners:
        groups: dict[tuple[Pair, int], list[int]] = {}
        for rank, pair in zip(ranks, told, strict=True):
            groups.setdefault((pair, -1 if all(pair[1]) else rank), []).append(rank)
        boxes = {Box(*pair): members for (pair, _), members in groups.items()}
        found = misfit(shape, boxes)
        if found is not None:
            parts = "; ".join(
                f"rank {', '.join(map(str, boxes[box]))}: {_in_words(box)}" for box in dict.fromkeys(found.boxes)
            )
            raise ArgumentError(
                f"{name}: {found.what} of its shape {tuple(shape)} ({parts}); expected that the ranks own the same "
                "part, or parts that do not overlap and cover the parameter. Is a mesh, or process_group=, too small?"
            )
        return Owners(tuple(Box(*pair) for pair, _ in groups), self.partition(list(groups.values())))


def _in_words(box: Box) -> str:
    return " x ".join(f"{o} to {o + n - 1}" for o, n in zip(box.offsets, box.lengths, strict=True)) or "all"
