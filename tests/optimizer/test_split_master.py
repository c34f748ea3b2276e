"""AdamW with master_dtype="split": the bits of whole masters in every schedule. Masters follow what users write; what
was not written keeps the bits of its remainder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.adamw_training import assert_worker_threads, model_of, worker_threads
from tests.support.split_masters import SPLIT, TIES, away, bits_of, masters_of, same_bits


def test_other_values_are_refused() -> None:
    model, threads = model_of(torch.float16), worker_threads()
    wrong: list[Any] = ["half", None, torch.bfloat16, True, ["split"]]
    for value in wrong:
        with pytest.raises(ArgumentError, match=r"master_dtype=.*expected 'fp32', or 'split'"):
            AdamW(model.parameters(), master_dtype=value)
    with pytest.raises(ArgumentError, match=r"master_dtype='split': .*\(0.weight is torch.float16\)"):
        AdamW(model.named_parameters(), **SPLIT)
    with pytest.raises(ValueError, match="params: empty; expected parameters to train"):
        AdamW([], **SPLIT)
    assert_worker_threads(set(threads))


pytestmark = pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")


def assign(param: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        param.copy_(values)


def through_data(param: Tensor, values: Tensor) -> None:
    param.data.copy_(values)


@pytest.mark.parametrize("refreshed", [False, True])
def test_zeros_and_what_is_no_number(refreshed: bool) -> None:
    """The other zero is what its user wrote. NaN of any pattern becomes that of the kernels."""
    param = nn.Parameter(torch.zeros(6).bfloat16())
    with AdamW([param], lr=0.0, **SPLIT) as optimizer:
        words = torch.tensor([0x0000, -0x8000, 0x7FC0, 0x7FC1, -0x0040, 0x7F80], dtype=torch.int16)
        through_data(param, words.view(torch.bfloat16))
        expected = [0x0000, 0x8000, 0x7FC0, 0x7FC0, 0x7FC0, 0x7F80]
        if refreshed:
            optimizer.refresh_masters()
            assert bits_of(optimizer.state[param]["master"]).tolist() == [word << 16 for word in expected]
        param.grad = torch.zeros(6).bfloat16()
        optimizer.step()
        assert bits_of(param).tolist() == expected
        assert bits_of(optimizer.state[param]["master"]).tolist() == [word << 16 for word in expected]


def neighbours(masters: Tensor) -> tuple[Tensor, Tensor]:
    """Those of ties, to which they are rounded: to even, and away from zero."""
    return masters.bfloat16(), away(masters)


@pytest.mark.parametrize(("refreshed", "master_dtype"), [(True, "fp32"), (False, "fp32"), (False, "split")])
def test_at_a_tie_both_neighbours_keep_the_master(refreshed: bool, master_dtype: str) -> None:
    """A checkpoint of whole masters has the even one, one of split masters the one away from zero."""
    masters = masters_of(TIES, 64)
    param = nn.Parameter(masters.bfloat16())
    with AdamW([param], lr=0.0, master_dtype=master_dtype) as optimizer:
        optimizer.load_masters([masters])
        even, other = neighbours(masters)
        assert (bits_of(even) != bits_of(other)).sum() == 32
        for published in (other, even):
            assign(param, published)
            if refreshed:
                optimizer.refresh_masters()
                assert same_bits(param.detach(), published)
            else:
                param.grad = torch.zeros_like(param)
                optimizer.step()
                assert same_bits(param.detach(), other if master_dtype == "split" else even)
            assert same_bits(optimizer.state[param]["master"], masters)
        farther = (bits_of(other) + 1).to(torch.int32).to(torch.int16).view(torch.bfloat16)
        assign(param, farther)
        optimizer.refresh_masters()
        assert same_bits(optimizer.state[param]["master"], farther.float())
