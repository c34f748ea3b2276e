"""Compares and sums the bits of whole tensors at memory's speed, eight bytes at a time, and finds NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from superoffload import _native

Sums: TypeAlias = object  # of one tensor's bits; opaque: each kind of BitSums has its own

WORD = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_WIDE = 8
_RUNS = 512


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compares two flat tensors of one dtype and length by their bits: -0 differs from 0, and a NaN equals itself."""
    mine, theirs = _words(one), _words(other)
    if [len(words) for words in mine] != [len(words) for words in theirs]:  # aligned differently
        mine, theirs = [_narrow(one)], [_narrow(other)]
    return all(map(torch.equal, mine, theirs))


def all_finite(tensor: Tensor) -> bool:
    """Tells whether every element is finite. Needs no memory, where ``torch.isfinite`` copies the tensor twice."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor.detach()))).all())


def same_but_for_nan(one: Tensor, other: Tensor) -> bool:
    """Compares bits, but takes every NaN as equal: torch's conversions give NaN other bits than ours do."""
    if same_bits(one, other):
        return True
    differ = _narrow(one) != _narrow(other)
    return not bool((differ & ~(one.isnan() & other.isnan())).any())


def run_sums(flat: Tensor) -> Tensor:
    """Sums 512 runs of a flat tensor's words, modulo 2^64, on the tensor's device and without waiting for it.

    An edit shows unless it leaves every sum unchanged. Below 1024 words each sum is of one word, so every edit shows.
    In longer runs a change of all signs, say, stays hidden only if equally many go each way in every run.
    """
    sums = torch.zeros(2 * _RUNS + _WIDE, dtype=torch.int64, device=flat.device)
    parts = _words(flat)
    places = (_RUNS, 0, _RUNS + _WIDE // 2) if len(parts) == 3 else (0,)  # the unaligned ends have places of their own
    for words, place in zip(parts, places, strict=True):
        whole = len(words) // _RUNS * _RUNS
        if whole:
            sums[:_RUNS] += words[:whole].view(_RUNS, -1).sum(1, dtype=torch.int64)
        if whole < len(words):
            place = place if whole == 0 else _RUNS + _WIDE
            sums[place : place + len(words) - whole] += words[whole:]
    return sums


class BitSums(Protocol):
    """Sums the bits of flat, contiguous tensors that are on the device that a link serves."""

    every_step: bool  # taking and comparing the sums costs no more than reading the tensors
    in_stream_order: bool  # sums follow the link's writes of parameters in the calling thread's stream

    def of(self, flats: Sequence[Tensor]) -> list[Sums]:
        """Takes the sums of all tensors together; returns one for each."""

    def changed(self, before: Sequence[Sums], flats: Sequence[Tensor]) -> list[bool]:
        """Tells for each tensor whether its sums changed. Compares all together, so it waits for a device only once."""


class SumsInMemory:
    """Sums tensors in host memory by one native call, at reading speed, with as many threads as torch has."""

    every_step = True
    in_stream_order = False

    def of(self, flats: Sequence[Tensor]) -> list[Sums]:
        """Takes two sums of 64 bits for each tensor, as 16 bytes."""
        runs = [(flat.data_ptr(), flat.numel() * flat.element_size()) for flat in flats]
        return list(_native.bit_sums(runs, torch.get_num_threads()))

    def changed(self, before: Sequence[Sums], flats: Sequence[Tensor]) -> list[bool]:
        """Compares new sums of all tensors with those before."""
        return [one != other for one, other in zip(before, self.of(flats), strict=True)]


class SumsByTorch:
    """Sums tensors on a device without our kernels, by some operations of torch for each tensor."""

    every_step = False
    in_stream_order = False

    def of(self, flats: Sequence[Tensor]) -> list[Sums]:
        """Takes the sums on the tensors' device, without waiting for it."""
        return [run_sums(flat) for flat in flats]

    def changed(self, before: Sequence[Sums], flats: Sequence[Tensor]) -> list[bool]:
        """Waits for the device once, however many tensors there are."""
        ones = [one for one in before if isinstance(one, Tensor)]
        if not ones:
            return []
        for tensor in ones:
            if tensor.is_cuda:  # another stream may have allocated this memory
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        now = torch.stack([run_sums(flat) for flat in flats])
        found: list[bool] = (torch.stack(ones) != now).any(1).tolist()
        return found


def _words(flat: Tensor) -> list[Tensor]:
    """Splits at the first and the last eight-byte boundary of the storage: head, aligned words, tail."""
    bits = _narrow(flat)
    per = _WIDE // bits.element_size()
    head = -bits.storage_offset() % per
    tail = head + (len(bits) - head) // per * per
    return [bits[:head], bits[head:tail].view(torch.int64), bits[tail:]] if head < tail else [bits]


def _narrow(flat: Tensor) -> Tensor:
    return flat.contiguous().view(WORD[flat.dtype])
