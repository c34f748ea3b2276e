"""Exchanges one optimizer's packets with the other ranks at each step, compares them and folds the verdict's sums.

The exchange starts when the local sums are known and travels while worker threads finish what they speculate. All
ranks see the same packets and compare them in the same order, so all of them raise the same error or none does.
"""

from __future__ import annotations

import math
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from superoffload.distributed.group import FAILED, FOUND_INF, LEFT, MOST_CLASSES, NO_INPUTS, Exchange, Packet, RankGroup
from superoffload.distributed.ownership import Holding, OwnersTable, RankGroups, check_strided, holder
from superoffload.distributed.rank_checks import (
    FullCheck,
    GradientOf,
    Held,
    Probe,
    Roster,
    bits_of,
    no_gradient,
    odd_ranks,
    probe,
)
from superoffload.errors import ArgumentError, RankError
from superoffload.host.processors import RankOnNode, allowed_cpus, cpus_near_gpu, share_cpus
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
        self._called = group.hosts.rank
        self._gathered = gathered
        self._gradient_of = gradient_of
        self._roster = Roster({group.rank: []}, {group.rank: []}, OwnersTable())
        self._mine = self._roster.of(group.rank)
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
        """Adds parameters, also those that train for the first time. Collective: all ranks must add some, the same ones
        or parts of one model."""
        self.held.extend(held)
        listings = [one.listing() for one in self.held]
        boxes = [(one.holding.box.offsets, one.holding.box.lengths) for one in self.held]
        checksum, what = zlib.crc32(repr(listings).encode()), f"new parameters{self._name}"
        told = self.group.exchange_objects(what, (str(self.check), checksum, boxes))
        checks = dict(zip(self.group.ranks, (check for check, *_ in told), strict=True))
        for rank, first in odd_ranks(checks):
            made = f"the optimizers{self._name} were made differently"
            self._diverged(
                f"{made}: {self._called(rank)}: rank_check is {checks[rank]}, on rank {first} {checks[first]}"
            )
        of_all = [listings] * len(told)
        if len({theirs for _, theirs, _ in told}) > 1:  # parts of one model, such as pipeline stages
            of_all = self.group.exchange_objects(what, listings)
        ranks = self.group.ranks
        self._roster = Roster(
            dict(zip(ranks, of_all, strict=True)),
            dict(zip(ranks, (theirs for *_, theirs in told), strict=True)),
            OwnersTable(),
        )
        self._mine = self._roster.of(self.group.rank)
        most = max(len(self._roster.replicas_of(rank)) for rank in ranks)
        if most > MOST_CLASSES:
            raise ArgumentError(
                f"params: {most} different sets of replicas on one rank, expected at most {MOST_CLASSES}; "
                "use fewer meshes"
            )
        check_strided((one.name, one.param) for one in held if is_dtensor(one.param))
        self._probe = Probe(0, 0, 0)  # an earlier one does not fit the units any more

    @property
    def has_parts(self) -> bool:
        """Tells whether ranks have different parameters: parts of one model, such as pipeline stages."""
        return len(self._roster.cohorts) > 1

    def owns_alone(self, index: int) -> bool:
        """Tells whether no other rank has the parameter, so that there is none to reduce its gradient with."""
        return self._mine.owners[index].replicas.groups == ((self.group.rank,),)

    def writer_of(self, index: int) -> int | None:
        """Returns the rank that writes this rank's part of a parameter to files; None if the part is empty."""
        return self._mine.owners[index].writer_of(self.group.rank)

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
                raise RankError(f"{what}: {self._called(rank)} failed, so {left}: {theirs}")

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

    def fail(self, *, left: bool = False) -> None:
        """Tells the others that this rank raises instead of stepping, so that they need not wait to find out.
        ``left``: since it has no more inputs."""
        if not self._told and self.group.failure is None and self._failure is None:  # known on all ranks
            self._told = True
            packet = replace(self._packet({}), flags=FAILED | (LEFT if left else 0))
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
        theirs = dict(zip(self.group.ranks, packets, strict=True))
        # Always compared: the next exchanges need equal sets.
        if any(len({theirs[rank].gradients for rank in cohort.ranks}) > 1 for cohort in self._roster.cohorts):
            detail = {one.name: one.shard.index in self._sums for one in self.held}
            advice = ". Where a rank's part needs none, as of experts without a token, give it zeros"
            self._explain("not the same parameters have a gradient", detail, of_all=False, advice=advice)
        if self.check.light or self.check.every:
            self._compare(packets)
        if not any(packet.gradients for packet in packets):
            return None
        # A NaN or an infinity on any rank counts, also on a replica whose sum does not.
        spoiled = any(packet.flags & FOUND_INF or not all(map(math.isfinite, packet.sums)) for packet in packets)
        sums = [math.inf] if spoiled else []
        for rank, packet in theirs.items():
            # Of ranks with the same shards the first one counts.
            classes = self._roster.replicas_of(rank)
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
        units = self._mine.units
        if not (self.check.light or self.check.every) or not units:
            return []
        return [self.held[index] for index in units[self._turn % len(units)]]

    def look(self) -> None:
        """Checks a part of what the last step has published; the next exchange tells the others. Not collective."""
        if self.check.light or self.check.every:
            self._probe = probe(self.held, self._mine.units, self._turn, self._has_copies)

    @property
    def full_check_is_due(self) -> bool:
        """Tells whether the step that has just ended gets a full check."""
        if not (self.check.light or self.check.every):
            return False
        return self._call <= self._full_until or bool(self.check.every and self._call % self.check.every == 0)

    def check_everything(self) -> None:
        """Runs the full check, collectively: copies, rounding and what forward gathers, of every parameter."""
        found = FullCheck(self.group, self.held, self._gathered, self._roster, self._gradient_of).run(
            self._where("the full check"), (self._applied, self._skipped, self._factor)
        )
        if found is not None:
            self._diverged(found)

    # ---- inside -----------------------------------------------------------------------------------------------

    def _packet(self, sums: Mapping[int, float]) -> Packet:
        totals = dict.fromkeys(self._roster.replicas_of(self.group.rank), 0.0)
        for key in self._roster.owners:  # in the same order on every rank, so that replicas have the same bits
            index = self._mine.index.get(key, -1)
            if index in sums:
                totals[self._mine.owners[index].replicas.of(self.group.rank)] += sums[index]
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
        left = [rank for rank, packet in zip(self.group.ranks, packets, strict=True) if packet.flags & LEFT]
        if left:
            raise RankError(NO_INPUTS.format(who=self.group.hosts.ranks(left)))
        if failed:
            raise RankError(
                f"step {self._call}: {self.group.hosts.ranks(failed)} raised before the verdict (its own output says "
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
            for mine, replicas in zip(packet.sums, self._roster.replicas_of(rank), strict=True):
                bits = bits_of(mine)
                if seen.setdefault(replicas, bits) != bits:
                    return True
        return False

    def _explain_gradients(self) -> None:
        sums = [self._sums.get(one.shard.index, 0.0) for one in self.held]
        told = dict(
            zip(self.group.ranks, self.group.exchange_objects(self._where("comparing gradients"), sums), strict=True)
        )
        for key, owners in self._roster.owners.items():
            values = {rank: told[rank][place] for rank, place in self._roster.holders(key)}
            for rank, first in _odd_of(values, owners.replicas):
                self._diverged(
                    f"step {self._call}: {self._called(rank)}: {key[0]}: its gradient differs from that of rank "
                    f"{first} (sums of squares {values[rank]!r} and {values[first]!r}), though both hold the same "
                    "elements. Gradients of replicated parameters must be reduced over the ranks before step()"
                )
        self._diverged(f"step {self._call}: gradients of replicated parameters differ between ranks")

    def _has_copies(self, index: int) -> bool:
        return self._mine.has_copies(index, self.group.rank)

    def _compare_probes(self, packets: Sequence[Packet]) -> None:
        step = self._call - 1
        for rank, packet in zip(self.group.ranks, packets, strict=True):
            if packet.bad:
                name = self._roster.of(rank).name(packet.bad - 1)
                self._diverged(
                    f"step {step}: {self._called(rank)}: {name}: the published parameter is not round(master). A "
                    "publish was lost, or the parameter was written through .data or foreign memory (then call "
                    "refresh_masters() after such a write)"
                )
        theirs = dict(zip(self.group.ranks, packets, strict=True))
        for cohort in self._roster.cohorts:
            probed = {theirs[rank].unit for rank in cohort.ranks}
            if not cohort.units or len(probed) > 1:
                continue
            unit = cohort.units[probed.pop()]
            values = {rank: theirs[rank].copy for rank in cohort.ranks}
            for _ in _odd_of(values, cohort.copies[unit[0]]):
                self.check_everything()  # names the parameter
                names = ", ".join(map(cohort.name, unit))
                self._diverged(f"step {step}: copies of a parameter differ between ranks, one of: {names}")

    def _explain(self, what: str, detail: Mapping[str, Any], *, of_all: bool = True, advice: str = "") -> None:
        """Exchanges ``detail`` and raises with the first entry that differs; ``of_all``: all ranks must have it."""
        told = dict(zip(self.group.ranks, self.group.exchange_objects(self._where(what), dict(detail)), strict=True))
        where = f"step {self._call}: {what}"
        for name in dict.fromkeys(key for theirs in told.values() for key in theirs):
            values = {r: theirs.get(name, "missing") for r, theirs in told.items() if of_all or name in theirs}
            for rank, first in odd_ranks(values):
                one, other = f"{name} is {values[rank]}", f"on rank {first} {values[first]}{advice}"
                self._diverged(f"{where}: {self._called(rank)}: {one}, {other}")
        self._diverged(where)

    def _diverged(self, message: str) -> None:
        self._failure = f"ranks have diverged: {message}"
        raise RankError(self._failure)


def _odd_of(values: Mapping[int, Any], same: RankGroups) -> Iterator[tuple[int, int]]:
    """Yields each rank whose value differs from that of most ranks of its group, with one of that majority."""
    for ranks in same.groups:
        known = {rank: values[rank] for rank in ranks if rank in values}
        yield from odd_ranks(known) if known else ()


# ---- set up from the arguments of superoffload.AdamW ----------------------------------------------------------------

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class RankSetup:
    """Describes this rank among the others. ``session`` None: it decides alone. ``sharing``: the ranks, of all
    ``world``, that share a verdict; ``first``: this is the first of them. ``reduced``: gradients of plain parameters
    are reduced over ranks during backward, though this rank may decide alone."""

    session: RankSession | None
    holding_of: Callable[[str, Tensor], Holding]
    cpus: list[int] | None = None  # this rank's share of the node's processors, if it shares the node with other ranks
    sharing: tuple[int, ...] = (0,)
    world: int = 1
    first: bool = True
    reduced: bool = False

    def is_reduced_later(self, param: Tensor) -> bool:
        """Returns whether a gradient may be reduced over ranks after its hook has run: it is not final there."""
        return not is_dtensor(param) and (self.reduced or self.session is not None)


def set_up_ranks(
    params: Sequence[Tensor],
    *,
    reduced: bool,
    forward_view: Callable[[], Gathered | None],
    replicated: str,
    check: tuple[bool, int],
    process_group: Any,
    timeout: float | None,
    gradient_of: Callable[[Tensor], Tensor | None],
) -> RankSetup:
    """Makes the setup, collectively if there are several ranks; loads nothing of torch.distributed if there are not."""
    import torch.distributed as dist

    from superoffload.distributed.group import rank_group, rank_timeout

    seconds = rank_timeout(timeout)
    if not dist.is_available() or not dist.is_initialized():
        return RankSetup(None, holder("local", None, 0))
    rank, world = dist.get_rank(), dist.get_world_size()
    if replicated == "local" and not any(is_dtensor(param) for param in params):
        return RankSetup(None, holder("local", None, 0), sharing=(rank,), world=world, reduced=reduced)
    group = rank_group(process_group, seconds)
    if group is None:
        return RankSetup(None, holder("local", None, rank), sharing=(rank,), world=world, reduced=reduced)
    session = RankSession(group, RankCheck(*check), forward_view(), gradient_of)
    mine = RankOnNode(socket.gethostname(), group.rank, tuple(allowed_cpus()), near_gpu(params))
    cpus = share_cpus(group.exchange_objects("the processors of each rank", mine), group.rank)
    ranks = tuple(group.ranks)
    return RankSetup(session, holder(replicated, ranks, rank), cpus, ranks, world, rank == ranks[0], reduced)


def near_gpu(params: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the processors next to the parameters' GPU, where that is known."""
    device = next((param.device for param in params if param.device.type == "cuda"), None)
    if device is None:
        return ()
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # older versions of torch
        return ()
    return cpus_near_gpu(bus)


def qualified_names(model: nn.Module | None) -> dict[int, str]:
    """Maps the ids of a model's parameters to their names, without the prefixes of wrappers."""
    named = model.named_parameters() if model is not None else ()
    return {id(param): plain_name(name) for name, param in named}


def plain_name(name: str) -> str:
    """Removes the prefixes of wrappers from ``name``."""
    for wrapper in _WRAPPERS[1:]:
        name = name.replace(wrapper, "")
    return name.removeprefix(_WRAPPERS[0])
