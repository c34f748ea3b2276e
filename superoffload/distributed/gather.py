"""Gathers plain parameters whose state is spread over ranks: every rank gets the parts of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superoffload.distributed.group import RankGroup
from superoffload.distributed.ownership import Holding

_BATCH_BYTES = 32 << 20  # per rank and exchange


@dataclass(frozen=True)
class Spread:
    """Pairs ``part``, this rank's elements, with ``whole``, which gets those of all ranks. Both flat, of one dtype."""

    holding: Holding
    part: Tensor
    whole: Tensor


@dataclass(frozen=True)
class _Run:
    """Covers elements ``start`` to ``start + length`` of every owner's part; owners with shorter parts have fewer."""

    spread: Spread
    start: int
    length: int

    def bytes_of(self, part: Tensor) -> Tensor:
        return part[self.start : self.start + self.length].contiguous().view(torch.uint8)


def gather(group: RankGroup, what: str, spreads: Sequence[Spread]) -> None:
    """Gathers collectively: all ranks must give the same parameters in the same order."""
    for runs in _batches(spreads):
        _gather_batch(group, what, runs)


def _batches(spreads: Sequence[Spread]) -> Iterator[list[_Run]]:
    runs: list[_Run] = []
    room = _BATCH_BYTES
    for spread in spreads:
        longest = max(run.numel for run in spread.holding.runs.values())
        size = spread.part.element_size()
        start = 0
        while start < longest:
            length = min(longest - start, max(1, room // size))
            runs.append(_Run(spread, start, length))
            start += length
            room -= length * size
            if room < size:
                yield runs
                runs, room = [], _BATCH_BYTES
    if runs:
        yield runs


def _gather_batch(group: RankGroup, what: str, runs: Sequence[_Run]) -> None:
    mine = torch.zeros(
        sum(run.length * run.spread.part.element_size() for run in runs), dtype=torch.uint8, device="cpu"
    )
    at = 0
    for run in runs:
        data = run.bytes_of(run.spread.part)
        mine[at : at + data.numel()] = data
        at += run.length * run.spread.part.element_size()
    parts = group.exchange_tensors(what, mine)
    for owner, data in zip(group.ranks, parts, strict=True):
        if owner != group.rank:
            _take(owner, data, runs)


def _take(owner: int, data: Tensor, runs: Sequence[_Run]) -> None:
    at = 0
    for run in runs:
        whole, size = run.spread.whole, run.spread.part.element_size()
        box = run.spread.holding.runs[owner]
        length = max(0, min(run.length, box.numel - run.start))
        first = box.offsets[0] + run.start
        if length:
            whole[first : first + length] = data[at : at + length * size].clone().view(whole.dtype)
        at += run.length * size
