"""Learning rates, betas and clips that change at any moment, by schedulers or by hand, and groups with their own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import (
    TorchAdamW,
    assert_trained_alike,
    batch,
    check_counters,
    model_of,
    train,
)


@pytest.mark.over_stand_in
@pytest.mark.parametrize("in_flight", [False, True])
def test_add_param_group_in_the_middle_of_a_run(in_flight: bool) -> None:
    """In flight: between backward and step(); the new parameters already have gradients."""

    def run(model: nn.Sequential, optimizer: Any) -> None:
        train(model, optimizer, range(4))
        optimizer.zero_grad()
        if in_flight:
            batch(model, 9).backward()
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 5e-3})
        if not in_flight:
            batch(model, 9).backward()
        optimizer.step()
        train(model, optimizer, range(4))

    models = [model_of() for _ in range(3)]
    torchs = TorchAdamW(models[0][:3].parameters())
    run(models[0], torchs)
    digests = []
    for model, mode in zip(models[1:], ("always", "never"), strict=True):
        with AdamW(model[:3].parameters(), speculation=mode) as optimizer:
            for param in model[3].parameters():
                param.grad = None
            run(model, optimizer)
            digests.append(optimizer.state_digests())
            check_counters(optimizer)
            assert_trained_alike(model, models[0])
    assert digests[0] == digests[1]
