"""Bits compared and summed in wide words: every position and length, wherever the memory begins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from superoffload.bits import WORD, differing, run_sums, same_bits


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
            before = run_sums(other)
            assert differing([before], [run_sums(other)]) == [False]
            for i in range(numel):
                bits = other.view(WORD[dtype])
                bits[i] ^= 1 << (i % 15)
                assert not same_bits(one, other)
                assert differing([before], [run_sums(other)]) == [True]
                bits[i] ^= 1 << (i % 15)
            assert same_bits(one, other) and torch.equal(run_sums(other), before)


def test_of_what_is_not_contiguous() -> None:
    whole = flat(torch.bfloat16, 64, 1)
    assert same_bits(whole[::2], whole[::2].clone())
    assert not same_bits(whole[::2], whole[1::2])
    assert not same_bits(torch.zeros(3), -torch.zeros(3))


@pytest.mark.parametrize("numel", [2, 4, 8, 512, 5000, 70_001])
def test_signs_that_change_as_often_one_way_as_the_other_are_seen(numel: int) -> None:
    """A plain sum of words would be the same."""
    for dtype in WORD:
        values = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=dtype)
        one = values.repeat(-(-numel // 8))[:numel].clone()
        before = run_sums(one)
        one[len(one) // 4 :] *= -1
        assert differing([before], [run_sums(one)]) == [True]


def test_several_at_once() -> None:
    ones = [run_sums(flat(torch.float32, numel, 0)) for numel in (0, 5, 3000)]
    others = [run_sums(flat(torch.float32, numel, 0, seed)) for numel, seed in ((0, 1), (5, 1), (3000, 0))]
    assert differing(ones, others) == [False, True, False]
    assert differing([], []) == []
