"""Tensors as their bits: compared and summed eight bytes at a time, ten to a hundred times as fast as two at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_WIDE = 8
_RUNS = 512


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Of two flat tensors of one dtype and length; -0 differs from 0, and a NaN equals itself."""
    mine, theirs = _words(one), _words(other)
    if [len(words) for words in mine] != [len(words) for words in theirs]:  # aligned otherwise
        mine, theirs = [_narrow(one)], [_narrow(other)]
    return all(map(torch.equal, mine, theirs))


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


def differing(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[bool]:
    """Which pairs of tensors of one size differ; their device is waited for once, however many they are."""
    if not ones:
        return []
    for tensor in (*ones, *others):
        if tensor.is_cuda:  # made on another stream, perhaps, whose memory it is
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    found: list[bool] = (torch.stack(list(ones)) != torch.stack(list(others))).any(1).tolist()
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
