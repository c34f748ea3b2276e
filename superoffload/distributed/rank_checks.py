"""Finds the ranks whose values differ from those of most ranks that should have the same.

A full check compares every parameter's copies, rounding and state across ranks, and what the next forward gathers; a
light check a sample of them.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superoffload.distributed.group import RankGroup
from superoffload.distributed.ownership import Box, Holding, Owners, OwnersTable, Pair, RankGroups, Ranks, box_of
from superoffload.engine.bucket import Shard
from superoffload.engine.master_halves import is_rounded
from superoffload.errors import ArgumentError, RankError
from superoffload.host.bits import all_finite, same_but_for_nan
from superoffload.host.tensors import in_order, is_dtensor, local_of


def odd_ranks(values: Mapping[int, Any]) -> list[tuple[int, int]]:
    """Returns (rank, one of the majority) for each minority rank; in a tie the lowest rank's value wins."""
    holders: dict[Any, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(_key(values[rank]), []).append(rank)
    most = max(holders.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return [(rank, most[0]) for ranks in holders.values() if ranks is not most for rank in ranks]


def bits_of(value: float) -> bytes:
    """Returns the bits of a float, so that NaN equals itself and the zeros differ."""
    return struct.pack("<d", value)


def _key(value: Any) -> Any:
    return bits_of(value) if isinstance(value, float) else value


# ---- which ranks should have the same -------------------------------------------------------------------------------
# Most often all ranks have the same parameters. Pipeline stages have different ones, and may share some (tied
# embeddings): those that have the same name.

Key = tuple[str, int]  # a name, and how many parameters before it on the same rank have the same
_UNITS = 32
UNNAMED = "param_groups["  # how the names of parameters begin that are known by their places only


class Listing(NamedTuple):
    """Says what a rank has of a parameter, but for its box.

    ``shape``: that the box is cut from. ``numel``: of the whole parameter. ``about``: must be the same on all ranks.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    kind: str
    about: tuple[object, ...]

    @property
    def is_spread(self) -> bool:
        """Tells whether each rank has the whole parameter but the state of only a part of it."""
        return self.kind == "spread"


@dataclass(frozen=True, eq=False)
class Cohort:
    """Holds what ranks with the same parameters, in the same order, have in common.

    ``copies``: of each parameter, the ranks on which the published copy must have the same bits. ``units``: consecutive
    parameters that a light check reads together; their copies are on the same ranks.
    """

    ranks: Ranks
    keys: tuple[Key, ...]
    owners: tuple[Owners, ...]
    copies: tuple[RankGroups, ...]
    units: tuple[tuple[int, ...], ...]
    index: Mapping[Key, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {key: i for i, key in enumerate(self.keys)})

    def name(self, index: int) -> str:
        return self.keys[index][0]

    def has_copies(self, index: int, rank: int) -> bool:
        """Tells whether another rank has the same elements of a parameter as ``rank``."""
        return len(self.copies[index].of(rank)) > 1

    def replicas(self) -> dict[int, list[Ranks]]:
        """Returns for each rank the different sets of replicas that it is in, in the order of its parameters."""
        partitions = list(dict.fromkeys(owners.replicas for owners in self.owners))
        return {rank: list(dict.fromkeys(one.of(rank) for one in partitions)) for rank in self.ranks}


class Roster:
    """Sorts ranks into cohorts. ``listings`` and ``boxes``: what each rank has of each of its parameters.

    Raises RankError or ArgumentError, the same on all ranks, where they do not fit together.
    """

    def __init__(
        self, listings: Mapping[int, Sequence[Listing]], boxes: Mapping[int, Sequence[Pair]], table: OwnersTable
    ) -> None:
        lists: dict[tuple[Listing, ...], list[int]] = {}
        known: dict[int, tuple[Listing, ...]] = {}  # most ranks share one list
        for rank, theirs in listings.items():
            lists.setdefault(known.setdefault(id(theirs), tuple(theirs)), []).append(rank)
        self._held: dict[Key, list[tuple[Ranks, int]]] = {}  # by ranks with the same list, and its place in that
        self._listing: dict[Key, Listing] = {}
        keys = {one: keys_of(one) for one in lists}
        for one, ranks in lists.items():
            for index, (key, listing) in enumerate(zip(keys[one], one, strict=True)):
                self._check_alike(key, listing, ranks[0])
                self._held.setdefault(key, []).append((tuple(ranks), index))
        self._check_named(lists)
        self._check_parts({tuple(ranks): set(keys[one]) for one, ranks in lists.items() if one})
        self.owners: dict[Key, Owners] = {}
        for key in self._held:
            self.owners[key] = self._owners_of(key, boxes, table, len(lists) > 1)
        self.cohorts = [self._cohort(tuple(ranks), one, keys[one], table) for one, ranks in lists.items()]
        self._of = {rank: cohort for cohort in self.cohorts for rank in cohort.ranks}
        self._replicas = {rank: sets for cohort in self.cohorts for rank, sets in cohort.replicas().items()}

    def of(self, rank: int) -> Cohort:
        return self._of[rank]

    def replicas_of(self, rank: int) -> list[Ranks]:
        """Returns the different sets of replicas that ``rank`` is in; it sends a sum of squares for each."""
        return self._replicas[rank]

    def holders(self, key: Key) -> list[tuple[int, int]]:
        """Returns the ranks that have a parameter, ascending, each with the place of it among its parameters."""
        return sorted((rank, index) for ranks, index in self._held[key] for rank in ranks)

    def place_on(self, rank: int, key: Key) -> int:
        """Returns which of the parameters of ``rank`` it is."""
        return self._of[rank].index[key]

    # ---- made -----------------------------------------------------------------------------------------------------

    def _check_alike(self, key: Key, listing: Listing, rank: int) -> None:
        first = self._listing.setdefault(key, listing)
        if (first.about, first.shape, first.kind) != (listing.about, listing.shape, listing.kind):
            other = self._held[key][0][0][0]
            raise RankError(
                f"ranks have diverged: the optimizers were made differently: rank {rank}: {listing.name} is "
                f"{(*listing.about, listing.kind)}, on rank {other} {(*first.about, first.kind)}. Different parameters "
                "of one model need different names"
            )

    def _check_named(self, lists: Mapping[tuple[Listing, ...], Sequence[int]]) -> None:
        """Different ranks may have different parameters only where names tell which they are."""
        if len(lists) < 2:
            return
        for one, ranks in lists.items():
            for listing in one:
                if listing.name.startswith(UNNAMED):
                    raise RankError(
                        f"ranks have diverged: the optimizers were made differently: rank {ranks[0]} has {len(one)} "
                        f"parameters, of which {listing.name} has no name, and not all ranks have the same ones. Parts "
                        "of one model, such as pipeline stages, need the names that their parameters have in the "
                        "whole model: pass model.named_parameters(), or model="
                    )

    def _check_parts(self, sets: Mapping[Ranks, set[Key]]) -> None:
        """Parts of one model lack parameters of each other. A rank that just has fewer was made wrongly."""
        for (few, fewer), (many, more) in permutations(sets.items(), 2):
            if fewer < more:
                missing, _ = min(more - fewer)
                raise RankError(
                    f"ranks have diverged: the optimizers were made differently: rank {few[0]} lacks {missing}, which "
                    f"rank {many[0]} has, and has nothing that rank {many[0]} lacks, so they are no parts of one model"
                )

    def _owners_of(self, key: Key, boxes: Mapping[int, Sequence[Pair]], table: OwnersTable, differ: bool) -> Owners:
        listing, holders = self._listing[key], self.holders(key)
        told = [boxes[rank][index] for rank, index in holders]
        ranks = tuple(rank for rank, _ in holders)
        if listing.kind == "local":
            return table.apart(ranks, told)
        try:
            return table.owners(listing.name, listing.shape, ranks, told)
        except ArgumentError as error:
            if not differ:
                raise
            raise RankError(
                f"ranks have diverged: the optimizers were made differently: only rank {', '.join(map(str, ranks))} "
                f"has {error}"
            ) from error

    def _cohort(self, ranks: Ranks, listings: Sequence[Listing], keys: tuple[Key, ...], table: OwnersTable) -> Cohort:
        owners = tuple(self.owners[key] for key in keys)
        copies = tuple(
            table.partition([[rank for rank, _ in self.holders(key)]]) if listing.is_spread else one.replicas
            for key, listing, one in zip(keys, listings, owners, strict=True)
        )
        return Cohort(ranks, keys, owners, copies, tuple(_units_of([one.numel for one in listings], copies)))


def keys_of(listings: Sequence[Listing]) -> tuple[Key, ...]:
    seen: Counter[str] = Counter()
    keys = []
    for listing in listings:
        keys.append((listing.name, seen[listing.name]))
        seen[listing.name] += 1
    return tuple(keys)


def _units_of(sizes: Sequence[int], copies: Sequence[RankGroups]) -> Iterator[tuple[int, ...]]:
    """Groups consecutive parameters whose copies are on the same ranks into about 32 units."""
    total, unit, filled = sum(sizes), list[int](), 0
    for i, size in enumerate(sizes):
        if unit and (filled * _UNITS >= total or copies[unit[-1]] != copies[i]):
            yield tuple(unit)
            unit, filled = [], 0
        unit.append(i)
        filled += size
    if unit:
        yield tuple(unit)


# ---- checksums and samples of a parameter ---------------------------------------------------------------------------

_SAMPLE = 1 << 16  # elements of a shard that a light check reads, spread over it


@dataclass(frozen=True, eq=False)
class Held:
    """Describes one parameter of the optimizer on this rank."""

    name: str
    param: Tensor
    shard: Shard
    holding: Holding

    @property
    def is_spread(self) -> bool:
        """Tells whether every rank has the whole parameter but the state of only a part of it."""
        return self.holding.kind == "spread"

    def copy(self) -> Tensor:
        """Returns this rank's elements of the published parameter, flat."""
        return in_order(local_of(self.param), self.holding.order)

    def listing(self) -> Listing:
        """Returns what other ranks must know of it."""
        holding = self.holding
        about: tuple[object, ...] = (tuple(self.param.shape), str(self.param.dtype), self.shard.group)
        if holding.order is not None:
            about = (*about, f"dimensions in memory {holding.order}")
        return Listing(self.name, holding.shape, self.param.numel(), holding.kind, about)


def crc(tensor: Tensor, start: int = 0) -> int:
    """Computes the checksum of a flat tensor's bits, continuing ``start``."""
    if tensor.numel() == 0:
        return start
    # Sums a copy: fully_shard resizes gathered parameters, and memory shared with NumPy cannot be resized.
    copy = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return zlib.crc32(copy.view(torch.uint8).numpy().data, start)


def is_published(held: Held, stride: int = 1, phase: int = 0) -> bool:
    """Tells whether the published part is round(master), in every ``stride``-th element from ``phase``."""
    masters = held.shard.read_masters(phase, stride)
    published = held.shard.target()[phase::stride].to(masters.device)
    if held.shard.apart or same_but_for_nan(published, masters.to(published.dtype)):
        return True
    return bool((is_rounded(published, masters) | (published.isnan() & masters.isnan())).all())


@dataclass(frozen=True)
class Probe:
    """Holds the result of one light check; see Packet."""

    unit: int
    bad: int
    copy: int


def probe(held: Sequence[Held], units: Sequence[Sequence[int]], turn: int, has_copies: Callable[[int], bool]) -> Probe:
    """Checks unit ``turn`` modulo the number of units; the work is constant, whatever the size of the model.

    ``has_copies(index)``: another rank has the same elements of the parameter.
    """
    if not units:
        return Probe(0, 0, 0)
    unit = turn % len(units)
    bad, copy = 0, 0
    for index in units[unit]:
        one = held[index]
        stride, phase = _sampling(one.shard.numel, turn // len(units))
        if not bad and not is_published(one, stride, phase):
            bad = 1 + index
        if has_copies(index):
            values = one.copy()
            stride, phase = _sampling(values.numel(), turn // len(units))
            copy = crc(values[phase::stride], copy)
    return Probe(unit, bad, copy)


def _sampling(numel: int, turn: int) -> tuple[int, int]:
    stride = max(1, numel // _SAMPLE)
    return stride, turn % stride


# ---- the full check -------------------------------------------------------------------------------------------------

GradientOf = Callable[[Tensor], Tensor | None]


def no_gradient(param: Tensor) -> None:
    """Returns None: where gradients are not in the parameters there is nothing to compare."""


_COLUMNS = ("published parameter", "state (master, exp_avg, exp_avg_sq)", "step count")
_NOT_ROUNDED, _GRADIENT, _WIDTH = 3, 4, 5


@dataclass(eq=False, repr=False)
class FullCheck:
    """Compares the ranks' parameters, which ``roster`` lists.

    ``gradient_of`` gives the gradient of a parameter that can be compared, or None. ``run`` is collective.
    """

    _group: RankGroup
    _held: Sequence[Held]
    _gathered: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None
    _roster: Roster
    _gradient_of: GradientOf

    def __post_init__(self) -> None:
        self._called = self._group.hosts.rank
        self._mine = self._roster.of(self._group.rank)

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
