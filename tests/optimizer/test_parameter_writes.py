"""Users write to parameters: between steps, between backward and step(), in place, by new storage. It is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import Optimizer, batch, check_scenario, model_of, train


def load_weights(model: nn.Module) -> None:
    other = model_of(next(model.parameters()).dtype, seed=5)
    model.load_state_dict(other.state_dict())


@pytest.mark.over_stand_in
@pytest.mark.parametrize(
    ("write", "in_flight"),
    [
        (lambda model: torch._foreach_mul_(list(model.parameters()), 0.5), True),
        (lambda model: model[0].weight.view(-1)[7].fill_(0.5), False),
        (load_weights, False),
        (load_weights, True),
        (lambda model: setattr(model[0].weight, "data", model[0].weight.detach() * 0.5), True),
    ],
)
def test_writes_are_kept(write: Callable[[Any], object], in_flight: bool) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        if in_flight:
            batch(model, 8).backward()
        with torch.no_grad():
            write(model)
        if not in_flight:
            batch(model, 8).backward()
        optimizer.step()
        train(model, optimizer, range(2))

    stats = check_scenario(scenario, bucket_numel=1024)
    assert (stats["buckets_undone"] > 0) == in_flight


def test_a_group_that_torch_refuses_leaves_the_optimizer_usable() -> None:
    model, more = model_of(), nn.Linear(3, 2)
    with AdamW(model.parameters(), threads=1) as optimizer:
        with pytest.raises(ValueError, match="with/without names"):
            optimizer.add_param_group({"params": list(more.named_parameters())})
        train(model, optimizer, range(2))
        assert optimizer.stats()["steps"] == 2 and len(optimizer.param_groups) == 1
