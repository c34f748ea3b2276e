"""What keys the noise of stochastic rounding must never change: runs that are resumed depend on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.engine.moments import noise_stream
from superoffload.errors import ArgumentError


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
