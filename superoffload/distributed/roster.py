"""Knows which parameters each rank has, by name, and who owns which part of them.

Most often all ranks have the same parameters. Pipeline stages have different ones, and may share some (tied
embeddings): those that have the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

from superoffload.distributed.owners import Owners, OwnersTable, Pair, Partition, Ranks
from superoffload.errors import ArgumentError, RankError

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
    copies: tuple[Partition, ...]
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


def _units_of(sizes: Sequence[int], copies: Sequence[Partition]) -> Iterator[tuple[int, ...]]:
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
