"""Bits compared and summed in wide words: every position and length, wherever the memory begins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from superoffload.bits import WORD, checksum, same_bits


def flat(dtype: torch.dtype, numel: int, offset: int, seed: int = 0) -> Tensor:
    """Random bits, NaNs included, that begin ``offset`` elements into their storage."""
    generator = torch.Generator().manual_seed(seed)
    word = WORD[dtype]
    limits = torch.iinfo(word)
    bits = torch.randint(limits.min, limits.max, (offset + numel,), dtype=word, generator=generator)
    return bits.view(dtype)[offset:]


@pytest.mark.parametrize("dtype", list(WORD), ids=str)
def test_every_changed_bit_is_seen(dtype: torch.dtype) -> None:
    for numel in (0, 1, 2, 3, 4, 5, 7, 8, 9, 31):
        for offset in range(5):
            one = flat(dtype, numel, 0)
            other = torch.cat([flat(dtype, offset, 0, 1), one])[offset:]
            assert same_bits(one, other) and same_bits(other, one)
            before = checksum(other)
            assert before == checksum(other)
            for i in range(numel):
                bits = other.view(WORD[dtype])
                bits[i] ^= 1 << (i % 15)
                assert not same_bits(one, other)
                assert checksum(other) != before
                bits[i] ^= 1 << (i % 15)
            assert same_bits(one, other) and checksum(other) == before


def test_of_what_is_not_contiguous() -> None:
    whole = flat(torch.bfloat16, 64, 1)
    assert same_bits(whole[::2], whole[::2].clone())
    assert not same_bits(whole[::2], whole[1::2])
    assert not same_bits(torch.zeros(3), -torch.zeros(3))
