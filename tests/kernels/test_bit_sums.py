"""Bits compared and summed in wide words: every position and length, wherever the memory begins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from superoffload import _native
from superoffload.host.bits import WORD, SumsByTorch, SumsInMemory, all_finite, same_bits, same_but_for_nan

WAYS = (SumsInMemory(), SumsByTorch())
IN_MEMORY = WAYS[0]


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
            before = [(way, way.of([other])) for way in WAYS]
            assert [way.changed(sums, [other]) for way, sums in before] == [[False]] * 2
            for i in range(numel):
                bits = other.view(WORD[dtype])
                bits[i] ^= 1 << (i % 15)
                assert not same_bits(one, other)
                assert [way.changed(sums, [other]) for way, sums in before] == [[True]] * 2
                bits[i] ^= 1 << (i % 15)
            assert same_bits(one, other)
            assert [way.changed(sums, [other]) for way, sums in before] == [[False]] * 2
            assert IN_MEMORY.of([other, one]) == 2 * IN_MEMORY.of([other])
    whole = flat(dtype, 64, 1)
    assert same_bits(whole[::2], whole[::2].clone()) and not same_bits(whole[::2], whole[1::2])


def test_nans_of_other_bits() -> None:
    """torch's own conversion gives a NaN other bits in the vector's middle than at its end."""
    one = torch.tensor([1.0, torch.nan, -0.0, torch.inf] * 9, dtype=torch.bfloat16)
    other = one.clone()
    other.view(torch.int16)[one.isnan()] = -1
    assert same_but_for_nan(one, other) and not same_bits(one, other)
    assert same_but_for_nan(one[1::2], other[1::2])
    for place, value in ((0, torch.nan), (1, 1.0), (2, 0.0), (3, torch.nan)):
        wrong = other.clone()
        wrong[place] = value
        assert not same_but_for_nan(one, wrong) and not same_but_for_nan(wrong, one)


@pytest.mark.parametrize("dtype", list(WORD), ids=str)
def test_changes_that_a_plain_sum_of_words_would_not_show(dtype: torch.dtype) -> None:
    """Signs that change as often one way as the other; in host memory the same words in other places."""
    for numel in (2, 8, 512, 70_001):
        values = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0], dtype=dtype)
        several = [torch.ones(0, dtype=dtype), values.repeat(-(-numel // 8))[:numel].clone(), values]
        before_it = [(way, way.of(several)) for way in WAYS]
        several[1][numel // 4 :] *= -1
        assert [way.changed(sums, several) for way, sums in before_it] == [[False, True, False]] * 2
    for numel in (40, 4096, 5001):
        one = flat(dtype, numel, 1)
        before = IN_MEMORY.of([one])
        for other in (one.roll(1), one.roll(32), one.flip(0), torch.cat([one[numel // 2 :], one[: numel // 2]])):
            assert IN_MEMORY.changed(before, [other]) == [True]


@pytest.mark.parametrize("dtype", list(WORD), ids=str)
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    for numel in (1, 2, 7, 8, 15, 16, 33, 65, 1001):
        values = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
        assert all_finite(values) and all_finite(-values)
        for i in {0, numel // 3, numel // 2, numel - 1}:
            for bad in (float("nan"), float("inf"), -float("inf")):
                values[i] = bad
                assert not all_finite(values), (numel, i, bad)
            values[i] = 1.0
    assert all_finite(torch.empty(0, dtype=dtype))


def test_sums_of_host_memory_do_not_depend_on_threads() -> None:
    """More than two threads' worth; a run of several chunks beside small ones."""
    large = flat(torch.float32, (96 << 20) // 4 + 5, 1)
    runs = [(part.data_ptr(), 4 * len(part)) for part in (large, large[:7], large[:0], large[: 5 << 20])]
    alone = _native.bit_sums(runs, 1)
    assert _native.bit_sums(runs, 4) == alone
    large[20 << 20] *= -1
    assert [one == other for one, other in zip(_native.bit_sums(runs, 3), alone, strict=True)] == [0, 1, 1, 1]
    large[20 << 20] *= -1
    swapped = torch.cat([large[1 << 20 : 2 << 20], large[: 1 << 20], large[2 << 20 :]])  # whole chunks
    assert _native.bit_sums([(swapped.data_ptr(), 4 * len(swapped))], 2) != alone[:1]
