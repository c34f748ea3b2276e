"""Describes a parameter to the rank checks: its shard here, where the other parts are, checksums and samples of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superoffload.distributed.ownership import Holding
from superoffload.distributed.roster import Listing
from superoffload.engine.bucket import Shard
from superoffload.engine.master_halves import is_rounded
from superoffload.host.bits import same_but_for_nan
from superoffload.host.tensors import in_order, local_of

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
    if same_but_for_nan(published, masters.to(published.dtype)):
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
