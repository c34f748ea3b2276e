"""State on the accelerator changes no bit: whatever is placed, clipped, skipped, edited, saved or loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superoffload
from superoffload.engine.bucket import Shard
from superoffload.engine.placement import Measured, choose_fraction, last_in_backward
from superoffload.errors import ArgumentError
from tests.support.resident_link import accelerator

HALF = {"gpu_fraction": 0.5}


class Model(nn.Module):
    """Registered in the order of forward; some parameters are larger than a block, some tiny."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 33), nn.Linear(33, 40), nn.Linear(40, 7)])
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make(dtype: torch.dtype, placement: Any, **options: Any) -> tuple[Model, superoffload.AdamW]:
    model = Model(dtype)
    options = {"lr": 1e-2, "max_grad_norm": 0.05, "bucket_numel": 1024, "threads": 1, **options}
    if options.get("delivery") == "on_demand":
        options["module"] = model
    named = list(model.named_parameters())
    decayed = {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.1}
    plain = {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0}
    return model, superoffload.AdamW([decayed, plain], placement=placement, **options)


def backward(model: Model, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 40, generator=generator).to(next(model.parameters()).dtype)
    (scale * model(x).float().square().mean()).backward()


def train(model: Model, optimizer: superoffload.AdamW, steps: Sequence[int]) -> None:
    """Clips in some steps. Step 3 has an infinity and is skipped; one call of step() is left out before step 5."""
    for step in steps:
        backward(model, step, scale=(1.0, 0.01, 30.0)[step % 3])
        if step == 3:
            grad = model.layers[0].weight.grad
            assert isinstance(grad, Tensor)
            grad[0, 0] = math.inf
        if step == 5:
            optimizer.zero_grad()
            backward(model, 50)
        optimizer.step()
        optimizer.zero_grad()


def shards_of(optimizer: superoffload.AdamW) -> list[Shard]:
    return optimizer._engine.shards


def test_the_end_of_backward_is_placed() -> None:
    with accelerator() as links:
        model, optimizer = make(torch.float32, HALF)
    total = sum(p.numel() for p in model.parameters())
    first = [shard.name for shard in shards_of(optimizer) if shard.resident]
    assert first[0] == "param_groups[0]['params'][0]"  # registered first: most likely the last of backward
    assert "param_groups[0]['params'][1]" not in first  # more than is left of the half
    assert 0.3 * total < optimizer.stats()["params_on_device"] <= 0.5 * total
    train(model, optimizer, range(2))
    resident = {shard.name for shard in shards_of(optimizer) if shard.resident}
    # By the observed order: the first layer's gradients come last, then the second layer's.
    assert {"param_groups[0]['params'][0]", "param_groups[1]['params'][0]"} <= resident
    assert set(links[0].residency.stepped) >= resident
    assert all(
        bucket.resident == piece.shard.resident for bucket in optimizer._engine.buckets for piece in bucket.pieces
    )


def test_what_a_program_writes_loads_and_edits_counts() -> None:
    """Parameters, masters and gradients, and a state_dict that goes both ways."""
    results = []
    for placement in (None, HALF, {"gpu_fraction": 1.0}):
        with accelerator():
            model, optimizer = make(torch.bfloat16, placement)
            other_model, other = make(torch.bfloat16, HALF if placement is None else None)
        named = dict(Model(torch.float32).named_parameters())
        masters = [*(named[name] for name in named if "weight" in name), *(named[n] for n in named if "bias" in n)]
        optimizer.load_masters([master.detach() for master in masters])
        train(model, optimizer, range(2))
        with torch.no_grad():
            model.get_parameter("layers.0.weight").mul_(0.5)
        train(model, optimizer, [2])
        model.get_parameter("layers.1.weight").data.clamp_(-0.01, 0.01)
        optimizer.refresh_masters()
        backward(model, 4)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        model.layers[2].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
        other_model.load_state_dict(model.state_dict())
        other.load_state_dict(optimizer.state_dict())
        for one_model, one in ((model, optimizer), (other_model, other)):
            train(one_model, one, [6, 7])
            results.append(one.state_digests())
    assert all(result == results[0] for result in results)


def test_the_fraction_that_auto_chooses_and_whole_parameters_up_to_it() -> None:
    for backward_seconds, optimizer_seconds, free, expected in (
        (1.0, 0.5, 1 << 40, 1 / 20),  # hidden but for the last bucket
        (1.0, 2.0, 1 << 40, 0.5),
        (0.0, 2.0, 1 << 40, 1.0),
        (1.0, 2.0, 14 * 1000, 0.25),  # half of the memory holds a quarter of 2000 parameters
        (1.0, 2.0, -5, 0.0),
        (1.0, 0.0, 1 << 40, 1 / 20),
    ):
        fraction, why = choose_fraction(Measured(backward_seconds, optimizer_seconds, free, 2000, 14.0, 20))
        assert fraction == pytest.approx(expected)
        assert "GiB of unused memory" in why
    sizes = [(1, 50), (2, 30), (3, 0), (4, 15), (5, 5)]
    assert last_in_backward(sizes, 1.0) == {1, 2, 4, 5}
    assert last_in_backward(sizes, 0.8) == {1, 2}
    assert last_in_backward(sizes, 0.4) == {2, 5}
    assert last_in_backward(sizes, 0.0) == set()
    assert last_in_backward([], 0.5) == set()


def test_wrong_placements_are_refused() -> None:
    values: list[Any] = [0.5, "gpu", {}, {"fraction": 0.5}, {"gpu_fraction": 0.5, "cpu": 1}]
    for value in (*values, *({"gpu_fraction": wrong} for wrong in (1.5, math.nan, True, "0.5"))):
        with pytest.raises(ArgumentError, match=r"placement=.*expected None, 'auto' or \{'gpu_fraction': f\}"):
            make(torch.float32, value)
    with pytest.raises(ArgumentError, match=r"placement=.*there is no accelerator, the parameters are on the CPU"):
        make(torch.float32, HALF)
