"""Exchanges one optimizer's packets with the other ranks at each step, compares them and folds the verdict's sums.

The exchange starts when the local sums are known and travels while worker threads finish what they speculate. All
ranks see the same packets and compare them in the same order, so all of them raise the same error or none does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from superoffload.distributed.disagreement import bits_of, odd_ranks
from superoffload.distributed.full_check import FullCheck, GradientOf, no_gradient
from superoffload.distributed.group import Exchange, RankGroup
from superoffload.distributed.held import Held, Probe, probe, units_of
from superoffload.distributed.message import FAILED, FOUND_INF, MOST_CLASSES, Packet
from superoffload.distributed.owners import Owners, OwnersTable, Pair, Partition
from superoffload.distributed.placements import check_strided
from superoffload.errors import ArgumentError, RankError
from superoffload.host.tensors import is_dtensor

Gathered = Callable[[], Iterator[tuple[Tensor, Tensor]]]

_FIRST_STEPS = 3  # are checked in full, whatever the options


@dataclass(frozen=True)
class RankCheck:
    """Says what is checked. ``light``: every step. ``every``: all of it every so many steps (0: first ones, loads)."""

    light: bool
    every: int


class RankSession:
    """Exchanges packets with the other ranks, compares them and folds the sums for the verdict.

    ``gathered`` yields (parameter, what forward would gather of it), collectively; None: asks the tensors.
    ``gradient_of`` gives the gradient of a parameter that the full check can compare between ranks.
    """

    def __init__(
        self, group: RankGroup, check: RankCheck, gathered: Gathered | None, gradient_of: GradientOf = no_gradient
    ) -> None:
        self.group = group
        self.check = check
        self.held: list[Held] = []
        self._gathered = gathered
        self._gradient_of = gradient_of
        self._owners: list[Owners] = []  # of each parameter
        self._copies: list[Partition] = []  # of each, the ranks with the same published copy
        self._classes: dict[int, list[tuple[int, ...]]] = {}  # of each rank, its sets of replicas
        self._units: list[list[int]] = []
        self._call = 0
        self._applied = self._skipped = 0
        self._factor = 0.0
        self._probe = Probe(0, 0, 0)
        self._turn = 0  # selects the unit that is checked next
        self._full_until = _FIRST_STEPS
        self._settings: Mapping[str, Any] = {}
        self._found_inf = False
        self._failure: str | None = None
        number = group.number_of_session()
        self._name = "" if number == 1 else f" of optimizer {number}"
        self._sums: dict[int, float] = {}
        self._told = True
        self._exchange: Exchange | None = None

    # ---- layout -----------------------------------------------------------------------------------------------

    def add(self, held: Sequence[Held]) -> None:
        """Adds parameters, also those that train for the first time; all ranks must add the same ones."""
        self.held.extend(held)
        signatures = [one.signature() for one in self.held]
        boxes = [(one.holding.box.offsets, one.holding.box.lengths) for one in self.held]
        checksum = zlib.crc32(repr((self.check, signatures)).encode())
        told = self.group.exchange_objects(f"new parameters{self._name}", (checksum, boxes))
        if len({theirs for theirs, _ in told}) > 1:
            detail = {"rank_check": str(self.check)}
            detail |= {f"parameter {i}": str(signature) for i, signature in enumerate(signatures)}
            self._explain(f"the optimizers{self._name} were made differently", detail, in_step=False)
        self._know_owners([theirs for _, theirs in told])
        check_strided((one.name, one.param) for one in held if is_dtensor(one.param))
        self._units = units_of(self.held, self._copies)
        # The units have changed, so an earlier probe no longer fits them.
        self._probe = Probe(0, 0, 0)

    def _know_owners(self, told: Sequence[Sequence[Pair]]) -> None:
        """Learns which ranks own what; ``told``: per rank the boxes of all parameters."""
        ranks = self.group.ranks
        table = OwnersTable(ranks)
        together, apart = table.partition([ranks]), table.partition([[rank] for rank in ranks])
        self._owners, self._copies = [], []
        for one, boxes in zip(self.held, zip(*told, strict=True), strict=True):
            if one.holding.kind == "local":
                self._owners.append(Owners((one.holding.box,) * len(ranks), apart))
            else:
                self._owners.append(table.owners(one.name, one.holding.shape, boxes))
            self._copies.append(together if one.is_spread else self._owners[-1].replicas)
        partitions = list(dict.fromkeys(owners.replicas for owners in self._owners))
        self._classes = {rank: list(dict.fromkeys(one.of(rank) for one in partitions)) for rank in ranks}
        most = max(map(len, self._classes.values()))
        if most > MOST_CLASSES:
            raise ArgumentError(
                f"params: {most} different sets of replicas on one rank, expected at most {MOST_CLASSES}; "
                "use fewer meshes"
            )

    def writer_of(self, index: int) -> int | None:
        """Returns the rank that writes this rank's part of a parameter to files; None if the part is empty."""
        return self._owners[index].writer_of(self.group.rank)

    def loaded(self, steps: int) -> None:
        """Has everything checked after the next step, since state was loaded."""
        self._call = max(steps, self._call)
        self._full_until = max(self._full_until, self._call + 1)
        self._probe = Probe(0, 0, 0)
        self._factor = 0.0
        self._applied = self._skipped = 0

    def agree(self, what: str, error: Exception | None, left: str = "nothing was changed on any") -> None:
        """Agrees that a load or the like failed on no rank. ``left``: what a failure on any rank leaves behind."""
        told = self.group.exchange_objects(
            f"{what}{self._name}", None if error is None else f"{type(error).__name__}: {error}"
        )
        for rank, theirs in zip(self.group.ranks, told, strict=True):
            if theirs is not None and error is None:
                raise RankError(f"{what}: rank {rank} failed, so {left}: {theirs}")

    # ---- one step ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a step(); every rank must do so."""
        if self._failure is not None:
            raise RankError(f"{self._failure} (the ranks have diverged; make new optimizers from the last checkpoint)")
        self._call += 1
        self._told = False
        self._settings, self._found_inf = {}, False

    def agree_on(self, settings: Mapping[str, Any], *, found_inf: bool) -> None:
        """Sets values that must be the same on all ranks. ``found_inf``: the loss scaler saw a NaN or an infinity."""
        self._settings, self._found_inf = settings, found_inf

    def fail(self) -> None:
        """Tells the others that this rank raises instead of stepping, so that they need not wait to find out."""
        if not self._told and self.group.failure is None and self._failure is None:  # known on all ranks
            self._told = True
            packet = replace(self._packet({}), flags=FAILED)
            with suppress(RankError):  # the caller's error is the one to raise
                self.group.exchange(self._where("the verdict"), packet.to_bytes()).wait()

    def start(self, sums: Mapping[int, float]) -> None:
        """Starts to send this rank's sums of squares, by the index of the shards that have a gradient."""
        self._sums = dict(sums)
        self._told = True
        self._exchange = self.group.exchange(self._where("the verdict"), self._packet(sums).to_bytes())

    def finish(self) -> list[float] | None:
        """Returns all ranks' sums in the order in which every rank folds them; None if no rank has any gradient."""
        packets = self._take()
        self._raise_failed(packets)
        if len({packet.gradients for packet in packets}) > 1:  # always: the next exchanges need equal sets
            detail = {one.name: one.shard.index in self._sums for one in self.held}
            self._explain("not the same parameters have a gradient", detail)
        if self.check.light or self.check.every:
            self._compare(packets)
        if not any(packet.gradients for packet in packets):
            return None
        # A NaN or an infinity on any rank counts, also on a replica whose sum does not.
        spoiled = any(packet.flags & FOUND_INF or not all(map(math.isfinite, packet.sums)) for packet in packets)
        sums = [math.inf] if spoiled else []
        for rank, packet in zip(self.group.ranks, packets, strict=True):
            # Of ranks with the same shards the first one counts.
            classes = self._classes[rank]
            sums.extend(mine for mine, replicas in zip(packet.sums, classes, strict=True) if replicas[0] == rank)
        return sums

    def ended(self, *, applied: bool, factor: float) -> None:
        """Notes that the step was applied or skipped; checks a part of what it published, or all if that is due."""
        self.count(applied=applied, factor=factor)
        self.look()
        if self.full_check_is_due:
            self.check_everything()

    def count(self, *, applied: bool, factor: float) -> None:
        """Notes that the step was applied or skipped, while what it publishes cannot be read yet."""
        self._applied += applied
        self._skipped += not applied
        self._factor = factor
        self._turn = self._call

    def seen_next(self) -> list[Held]:
        """Returns the parameters that ``look()`` will check."""
        if not (self.check.light or self.check.every) or not self._units:
            return []
        return [self.held[index] for index in self._units[self._turn % len(self._units)]]

    def look(self) -> None:
        """Checks a part of what the last step has published; the next exchange tells the others. Not collective."""
        if self.check.light or self.check.every:
            self._probe = probe(self.held, self._units, self._turn, self._has_copies)

    @property
    def full_check_is_due(self) -> bool:
        """Tells whether the step that has just ended gets a full check."""
        if not (self.check.light or self.check.every):
            return False
        return self._call <= self._full_until or bool(self.check.every and self._call % self.check.every == 0)

    def check_everything(self) -> None:
        """Runs the full check, collectively: copies, rounding and what forward gathers, of every parameter."""
        found = FullCheck(self.group, self.held, self._gathered, self._owners, self._gradient_of).run(
            self._where("the full check"), (self._applied, self._skipped, self._factor)
        )
        if found is not None:
            self._diverged(found)

    # ---- inside -----------------------------------------------------------------------------------------------

    def _packet(self, sums: Mapping[int, float]) -> Packet:
        totals = dict.fromkeys(self._classes.get(self.group.rank, ()), 0.0)
        for index, value in sums.items():  # in registration order, as the engine gives them
            totals[self._owners[index].replicas.of(self.group.rank)] += value
        return Packet(
            sums=tuple(totals.values()),
            flags=FOUND_INF if self._found_inf else 0,
            settings=zlib.crc32(repr(sorted(self._settings.items())).encode()),
            gradients=zlib.crc32(np.array(sorted(sums), np.uint32).tobytes()) if sums else 0,
            applied=self._applied & 0xFFFFFFFF,
            skipped=self._skipped & 0xFFFFFFFF,
            unit=self._probe.unit,
            bad=self._probe.bad,
            copy=self._probe.copy,
            factor=self._factor,
        )

    def _take(self) -> list[Packet]:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        return [Packet.from_bytes(data) for data in exchange.wait()]

    def _where(self, what: str) -> str:
        return f"{what} of step {self._call}{self._name}"

    def _raise_failed(self, packets: Sequence[Packet]) -> None:
        failed = [rank for rank, packet in zip(self.group.ranks, packets, strict=True) if packet.flags & FAILED]
        if failed:
            raise RankError(
                f"step {self._call}: rank {', '.join(map(str, failed))} raised before the verdict (its own output says "
                "why), so the step was abandoned on every rank"
            )

    def _compare(self, packets: Sequence[Packet]) -> None:
        """Raises on every rank, with the same message, if any two of them disagree."""
        if len({packet.settings for packet in packets}) > 1:
            self._explain("the ranks step with different settings", {k: repr(v) for k, v in self._settings.items()})
        if self._unequal_sums(packets):
            self._explain_gradients()
        outcomes = {(packet.applied, packet.skipped, bits_of(packet.factor)) for packet in packets}
        if len(outcomes) > 1:
            ended = {"steps applied": self._applied, "steps skipped": self._skipped, "gradient factor": self._factor}
            self._explain("the step before did not end alike", ended)
        self._compare_probes(packets)

    def _unequal_sums(self, packets: Sequence[Packet]) -> bool:
        """Tells whether ranks with the same shards have different gradients of them. A NaN or an infinity on any rank
        makes all skip the step, so nothing is compared then."""
        if not all(math.isfinite(mine) for packet in packets for mine in packet.sums):
            return False
        seen: dict[tuple[int, ...], bytes] = {}
        for rank, packet in zip(self.group.ranks, packets, strict=True):
            for mine, replicas in zip(packet.sums, self._classes[rank], strict=True):
                bits = bits_of(mine)
                if seen.setdefault(replicas, bits) != bits:
                    return True
        return False

    def _explain_gradients(self) -> None:
        sums = [self._sums.get(one.shard.index, 0.0) for one in self.held]
        told = self.group.exchange_objects(self._where("comparing gradients"), sums)
        for index, one in enumerate(self.held):
            values = {rank: theirs[index] for rank, theirs in zip(self.group.ranks, told, strict=True)}
            for rank, first in _odd_of(values, self._owners[index].replicas):
                self._diverged(
                    f"step {self._call}: rank {rank}: {one.name}: its gradient differs from that of rank {first} "
                    f"(sums of squares {values[rank]!r} and {values[first]!r}), though both hold the same elements. "
                    "Gradients of replicated parameters must be reduced over the ranks before step()"
                )
        self._diverged(f"step {self._call}: gradients of replicated parameters differ between ranks")

    def _has_copies(self, index: int) -> bool:
        return len(self._copies[index].of(self.group.rank)) > 1

    def _compare_probes(self, packets: Sequence[Packet]) -> None:
        step = self._call - 1
        for rank, packet in zip(self.group.ranks, packets, strict=True):
            if packet.bad:
                self._diverged(
                    f"step {step}: rank {rank}: {self.held[packet.bad - 1].name}: the published parameter is not "
                    "round(master). A publish was lost, or the parameter was written through .data or foreign memory "
                    "(then call refresh_masters() after such a write)"
                )
        if not self._units or len({packet.unit for packet in packets}) > 1:
            return
        unit = self._units[packets[0].unit]
        values = {rank: packet.copy for rank, packet in zip(self.group.ranks, packets, strict=True)}
        for _ in _odd_of(values, self._copies[unit[0]]):
            self.check_everything()  # names the parameter
            names = ", ".join(self.held[index].name for index in unit)
            self._diverged(f"step {step}: copies of a parameter differ between ranks, one of: {names}")

    def _explain(self, what: str, detail: Mapping[str, Any], *, in_step: bool = True) -> None:
        """Exchanges ``detail`` and raises with the first entry that differs."""
        told = self.group.exchange_objects(self._where(what) if in_step else what, dict(detail))
        where = f"step {self._call}: {what}" if in_step else what
        for name in dict.fromkeys(key for theirs in told for key in theirs):
            values = {r: theirs.get(name, "missing") for r, theirs in zip(self.group.ranks, told, strict=True)}
            for rank, first in odd_ranks(values):
                self._diverged(f"{where}: rank {rank}: {name} is {values[rank]}, on rank {first} {values[first]}")
        self._diverged(where)

    def _diverged(self, message: str) -> None:
        self._failure = f"ranks have diverged: {message}"
        raise RankError(self._failure)


def _odd_of(values: Mapping[int, Any], same: Partition) -> Iterator[tuple[int, int]]:
    """Yields each rank whose value differs from that of most ranks of its group, with one of that majority."""
    for ranks in same.groups:
        yield from odd_ranks({rank: values[rank] for rank in ranks})
