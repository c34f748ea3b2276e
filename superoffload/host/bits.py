"""Whole tensors at memory's speed: compared and summed as bits, eight bytes at a time, and searched for NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from superoffload import _native

Sums: TypeAlias = object  # of one tensor's bits, as who takes them keeps them

WORD = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_WIDE = 8
_RUNS = 512


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Of two flat tensors of one dtype and length; -0 differs from 0, and a NaN equals itself."""
    mine, theirs = _words(one), _words(other)
    if [len(words) for words in mine] != [len(words) for words in theirs]:  # aligned otherwise
        mine, theirs = [_narrow(one)], [_narrow(other)]
    return all(map(torch.equal, mine, theirs))


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite. Needs no memory, where ``torch.isfinite`` copies the tensor twice."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor.detach()))).all())


def same_but_for_nan(one: Tensor, other: Tensor) -> bool:
    """Likewise, with every NaN equal to every other: conversions by torch give them other bits than ours do."""
    if same_bits(one, other):
        return True
    differ = _narrow(one) != _narrow(other)
    return not bool((differ & ~(one.isnan() & other.isnan())).any())


def run_sums(flat: Tensor) -> Tensor:
    """Sums of 512 runs of a flat tensor's words, modulo 2^64: on its device, and without waiting for it.

    An edit shows unless it leaves all of them as they are. Fewer than 1024 words are sums of one word each, so there
    every edit shows; a change of all signs, say, would have to go both ways equally often in every run of more.
    """
    sums = torch.zeros(2 * _RUNS + _WIDE, dtype=torch.int64, device=flat.device)
    parts = _words(flat)
    places = (_RUNS, 0, _RUNS + _WIDE // 2) if len(parts) == 3 else (0,)  # what is left at the ends apart
    for words, place in zip(parts, places, strict=True):
        whole = len(words) // _RUNS * _RUNS
        if whole:
            sums[:_RUNS] += words[:whole].view(_RUNS, -1).sum(1, dtype=torch.int64)
        if whole < len(words):
            place = place if whole == 0 else _RUNS + _WIDE
            sums[place : place + len(words) - whole] += words[whole:]
    return sums


class BitSums(Protocol):
    """A link's way to sums of the bits of tensors, flat and contiguous, that are where it serves parameters."""

    every_step: bool  # to take and compare them costs no more than reading the tensors
    in_stream_order: bool  # behind what the link has enqueued to write parameters in the calling thread's stream

    def of(self, flats: Sequence[Tensor]) -> list[Sums]:
        """One for each; taken together."""

    def changed(self, before: Sequence[Sums], flats: Sequence[Tensor]) -> list[bool]:
        """Whose bits now have other sums than before; compared together, so that a device is waited for once."""


class SumsInMemory:
    """Those of host memory: one native call takes them, as fast as it can read, with as many threads as torch has."""

    every_step = True
    in_stream_order = False

    def of(self, flats: Sequence[Tensor]) -> list[Sums]:
        """Two sums of 64 bits each, as 16 bytes."""
        runs = [(flat.data_ptr(), flat.numel() * flat.element_size()) for flat in flats]
        return list(_native.bit_sums(runs, torch.get_num_threads()))

    def changed(self, before: Sequence[Sums], flats: Sequence[Tensor]) -> list[bool]:
        """At once."""
        return [one != other for one, other in zip(before, self.of(flats), strict=True)]


class SumsByTorch:
    """Those of a device without our kernels: some operations of torch for each tensor."""

    every_step = False
    in_stream_order = False

    def of(self, flats: Sequence[Tensor]) -> list[Sums]:
        """On their device, without waiting for it."""
        return [run_sums(flat) for flat in flats]

    def changed(self, before: Sequence[Sums], flats: Sequence[Tensor]) -> list[bool]:
        """The device is waited for once, however many they are."""
        ones = [one for one in before if isinstance(one, Tensor)]
        if not ones:
            return []
        for tensor in ones:
            if tensor.is_cuda:  # made on another stream, perhaps, whose memory it is
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        now = torch.stack([run_sums(flat) for flat in flats])
        found: list[bool] = (torch.stack(ones) != now).any(1).tolist()
        return found


def _words(flat: Tensor) -> list[Tensor]:
    """What comes before the first eight bytes that are aligned in the storage, those and all that follow, the rest."""
    bits = _narrow(flat)
    per = _WIDE // bits.element_size()
    head = -bits.storage_offset() % per
    tail = head + (len(bits) - head) // per * per
    return [bits[:head], bits[head:tail].view(torch.int64), bits[tail:]] if head < tail else [bits]


def _narrow(flat: Tensor) -> Tensor:
    return flat.contiguous().view(WORD[flat.dtype])
