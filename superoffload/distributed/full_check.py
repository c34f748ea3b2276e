"""Compares every parameter's copies, rounding and state across ranks, and what the next forward gathers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superoffload.distributed.boxes import Box
from superoffload.distributed.disagreement import odd_ranks
from superoffload.distributed.group import RankGroup
from superoffload.distributed.held import Held, crc, is_published
from superoffload.distributed.placements import box_of
from superoffload.distributed.roster import Roster
from superoffload.host.bits import all_finite
from superoffload.host.tensors import is_dtensor, local_of

GradientOf = Callable[[Tensor], Tensor | None]


def no_gradient(param: Tensor) -> None:
    """Returns None: where gradients are not in the parameters there is nothing to compare."""


_COLUMNS = ("published parameter", "state (master, exp_avg, exp_avg_sq)", "step count")
_NOT_ROUNDED, _GRADIENT, _WIDTH = 3, 4, 5


class FullCheck:
    """Compares the ranks' parameters, which ``roster`` lists.

    ``gradient_of`` gives the gradient of a parameter that can be compared, or None. ``run`` is collective.
    """

    def __init__(
        self,
        group: RankGroup,
        held: Sequence[Held],
        gathered: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None,
        roster: Roster,
        gradient_of: GradientOf,
    ) -> None:
        self._group = group
        self._called = group.hosts.rank
        self._held = held
        self._gathered = gathered
        self._roster = roster
        self._mine = roster.of(group.rank)
        self._gradient_of = gradient_of

    @torch.no_grad()
    def run(self, where: str, outcome: tuple[int, int, float]) -> str | None:
        """Returns the first fault that it finds, as the same text on every rank; None if there is none."""
        rows = np.array([self._row(one) for one in self._held], np.uint32).reshape(-1, _WIDTH)
        header = np.array([zlib.crc32(repr(outcome).encode())], np.uint32)
        told = self._exchange(where, np.concatenate([header, rows.reshape(-1)]))
        heads = {rank: int(theirs[0]) for rank, theirs in told.items()}
        for rank, first in odd_ranks(heads):
            return f"{where}: {self._called(rank)}: the verdict was carried out otherwise than on rank {first}"
        tables = {rank: theirs[1:].reshape(-1, _WIDTH) for rank, theirs in told.items()}
        return (
            self._bad_gradients(where, tables)
            or self._bad_rounding(where, tables)
            or self._bad_copies(where, tables)
            or self._bad_forward(where)
        )

    def _row(self, one: Held) -> tuple[int, int, int, int, int]:
        shard = one.shard
        state = crc(shard.exp_avg_sq, crc(shard.exp_avg, crc(shard.read_masters())))
        return crc(shard.target()), state, shard.steps, int(not is_published(one)), self._gradient(one)

    def _gradient(self, one: Held) -> int:
        """Returns the checksum of a gradient that every rank has in full; 0 if there is none to compare.

        A gradient that is not finite is not compared: all ranks skip that step, whichever of them saw it.
        """
        gradient = self._gradient_of(one.param) if one.is_spread else None
        if gradient is None:
            return 0
        values = gradient.detach().reshape(-1)
        return crc(values) if all_finite(values) else 0

    def _exchange(self, where: str, mine: NDArray[np.uint32]) -> dict[int, NDArray[np.uint32]]:
        told = self._group.exchange_bytes(where, mine.tobytes())
        return {rank: np.frombuffer(data, np.uint32) for rank, data in zip(self._group.ranks, told, strict=True)}

    def _bad_gradients(self, where: str, tables: dict[int, NDArray[np.uint32]]) -> str | None:
        """Finds unreduced gradients. With spread state each rank sums only its own part, so only this shows them."""
        for key in self._roster.owners:
            values = {rank: int(tables[rank][index, _GRADIENT]) for rank, index in self._roster.holders(key)}
            known = {rank: value for rank, value in values.items() if value}
            for rank, first in odd_ranks(known) if known else ():
                return (
                    f"{where}: {self._called(rank)}: {key[0]}: its gradient differs from that of rank {first}, though "
                    "both have the whole parameter. Gradients of replicated parameters must be reduced over the ranks "
                    "before step()"
                )
        return None

    def _bad_rounding(self, where: str, tables: dict[int, NDArray[np.uint32]]) -> str | None:
        for rank, table in tables.items():
            for index in np.flatnonzero(table[:, _NOT_ROUNDED]).tolist():
                name = self._roster.of(rank).name(index)
                return f"{where}: {self._called(rank)}: {name}: the published parameter is not round(master)"
        return None

    def _bad_copies(self, where: str, tables: dict[int, NDArray[np.uint32]]) -> str | None:
        for key, owners in self._roster.owners.items():
            place = dict(self._roster.holders(key))
            for column, what in enumerate(_COLUMNS):
                for replicas in owners.replicas.groups:
                    values = {rank: int(tables[rank][place[rank], column]) for rank in replicas}
                    for rank, first in odd_ranks(values):
                        return f"{where}: {self._called(rank)}: {key[0]}: its {what} differs from that of rank {first}"
        return None

    def _bad_forward(self, where: str) -> str | None:
        """Finds a part whose values in a rank's forward differ from those that the part's owner has published."""
        seen = {one.shard.index: (full.dtype, self._part_checksums(one, full)) for one, full in self._wholes()}
        own = np.zeros(len(self._held), np.uint32)
        for index, (dtype, _) in seen.items():
            own[index] = _checksum(self._held[index].shard.target().to(dtype))
        published = self._exchange(where, own)
        report = np.zeros(2, np.uint32)
        for index, (_, checksums) in seen.items():
            key = self._mine.keys[index]
            for owner, checksum in checksums.items():
                if not report[0] and int(published[owner][self._roster.place_on(owner, key)]) != checksum:
                    report = np.array([1 + index, owner], np.uint32)
        for rank, (bad, owner) in self._exchange(where, report).items():
            if bad:
                name = self._roster.of(rank).name(int(bad) - 1)
                return (
                    f"{where}: {self._called(rank)}: {name}: what its forward reads is not "
                    f"what rank {owner} has published: updated parameters do not reach this rank"
                )
        return None

    def _part_checksums(self, one: Held, seen: Tensor) -> dict[int, int]:
        """Returns a checksum of each owner's part, as far as this rank sees it: with tensor parallelism a part of the
        parameter, which is a DTensor."""
        view = box_of(one.name, seen) if is_dtensor(seen) else Box.whole(one.holding.shape)
        checksums = {}
        for rank, box in self._mine.owners[one.shard.index].parts():
            inside = box.within(view)
            if inside is not None:
                checksums[rank] = _checksum(one.holding.box_of_whole(local_of(seen), inside))
        return checksums

    def _wholes(self) -> Iterator[tuple[Held, Tensor]]:
        """Yields parameters as a forward sees them, one after the other."""
        spread = (one for one in self._held if sum(1 for _ in self._mine.owners[one.shard.index].parts()) > 1)
        todo = {id(one.param): one for one in spread}
        if self._gathered is not None:
            for param, full in self._gathered():
                one = todo.pop(id(param), None)
                if one is not None:
                    yield one, full
        for one in todo.values():
            whole: Any = one.param.detach()
            yield one, whole.full_tensor() if is_dtensor(whole) else whole


def _checksum(values: Tensor) -> int:
    """Sums converted values, with one pattern for NaN: a conversion's NaN bits depend on its place in memory."""
    return crc(values.masked_fill(values.isnan(), torch.nan))
