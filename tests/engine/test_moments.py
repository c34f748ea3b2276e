"""8-bit moments are read and loaded like the reference's, whole and in any pieces; what keys the noise of stochastic
rounding must never change, since runs that are resumed depend on it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from superoffload import AdamW
from superoffload.engine import moments
from superoffload.engine.moments import noise_stream
from superoffload.errors import ArgumentError
from tests.support.reference import eight_bit

FORMS = [(moments.EXP_AVG, eight_bit.EXP_AVG), (moments.EXP_AVG_SQ, eight_bit.EXP_AVG_SQ)]
each_form = pytest.mark.parametrize(("form", "reference"), FORMS, ids=["exp_avg", "exp_avg_sq"])


def numbers(numel: int, *, signed: bool, seed: int = 3) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel) * 10.0 ** random.uniform(-45, 3, numel)
    values[: numel // 3] *= 1e30  # blocks near the largest numbers
    values[numel // 2 : numel // 2 + 300] = 0
    return (values if signed else np.abs(values)).astype(np.float32)


@each_form
def test_every_byte_under_every_scale(form: moments.CodeFormat, reference: eight_bit.Format) -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), 256)
    stored = np.concatenate([codes, np.arange(256, dtype=np.uint8)])
    expected = eight_bit.read(stored, len(codes), reference)
    found = moments.read_moment(torch.from_numpy(stored), len(codes), form)
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(found.float().numpy(), expected)  # so bfloat16 has every value


@each_form
def test_loaded_values_are_the_nearest_codes(form: moments.CodeFormat, reference: eight_bit.Format) -> None:
    for numel in (1, 255, 256, 257, 1000, (1 << 17) + 700):
        values = numbers(numel, signed=form.signed)
        stored = torch.full((moments.stored_numel(numel, torch.uint8),), 99, dtype=torch.uint8)
        moments.write_moment(stored, numel, form, [(0, torch.from_numpy(values))])
        np.testing.assert_array_equal(stored.numpy(), eight_bit.written(values, reference))


@each_form
def test_values_with_codes_are_loaded_without_loss(form: moments.CodeFormat, reference: eight_bit.Format) -> None:
    """Also where no value has the topmost binade of the scale that they were stored under."""
    random = np.random.default_rng(0)
    numel = 256 * 40 + 17
    stored = random.integers(0, 256, eight_bit.stored_size(numel), np.uint8)
    stored[:numel] %= random.integers(1, 128, numel).astype(np.uint8)
    stored[numel:] %= 255  # no NaN
    values = eight_bit.read(stored, numel, reference)
    again = torch.zeros(len(stored), dtype=torch.uint8)
    moments.write_moment(again, numel, form, [(0, torch.from_numpy(values))])
    np.testing.assert_array_equal(eight_bit.read(again.numpy(), numel, reference), values)


def test_pieces_of_any_size_in_any_order() -> None:
    random, numel = np.random.default_rng(0), 2817
    values = torch.from_numpy(numbers(numel, signed=True))
    whole, pieces = (torch.zeros(moments.stored_numel(numel, torch.uint8), dtype=torch.uint8) for _ in range(2))
    moments.write_moment(whole, numel, moments.EXP_AVG, [(0, values)])
    cuts = sorted({0, numel, *random.integers(0, numel, 12).tolist()})
    given = [(begin, values[begin:end]) for begin, end in pairwise(cuts)]
    random.shuffle(given)
    moments.write_moment(pieces, numel, moments.EXP_AVG, given)
    assert torch.equal(whole, pieces)


def test_the_keys_of_names_and_seeds() -> None:
    """Recorded; another release must have the same."""
    assert noise_stream(0, "model.layers.0.weight") == 13232658181134851750
    names = [f"model.layers.{i}.weight" for i in range(10_000)]
    assert len({noise_stream(seed, name) for seed in (0, 1, 2**32 - 1) for name in names}) == 30_000


def folded() -> nn.Parameter:
    """Lies in memory along seven axes: every second dimension comes last."""
    order = (1, 3, 5, 7, 0, 2, 4, 6)
    back = [order.index(dim) for dim in range(8)]
    return nn.Parameter(torch.zeros((2,) * 8).permute(order).contiguous().permute(back))


REFUSED = r"along 8 dimensions, expected at most 6 with rounded moments; pass state_dtype='fp32'"


def test_more_axes_than_the_kernels_know_are_refused() -> None:
    """Before anything is changed; with fp32 moments nothing is rounded."""
    first = nn.Parameter(torch.ones(40))
    with pytest.raises(ArgumentError, match=f"^folded: .*{REFUSED}"):
        AdamW([("first", first), ("folded", folded())], state_dtype="bf16")
    with AdamW([("first", first)], state_dtype="bf16") as optimizer:
        with pytest.raises(ArgumentError, match=f"^folded: .*{REFUSED}"):
            optimizer.add_param_group({"params": [("fine", nn.Parameter(torch.ones(3))), ("folded", folded())]})
        first.grad = torch.ones_like(first)
        optimizer.step()
        assert len(optimizer.param_groups) == 1 and list(optimizer.state) == [first]
    with AdamW([("folded", folded())]) as exact:
        exact.param_groups[0]["params"][0].grad = torch.ones((2,) * 8)
        exact.step()
