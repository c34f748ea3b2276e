"""Learning rates, betas and clips that change at any moment, by schedulers or by hand, and groups with their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import (
    Optimizer,
    TorchAdamW,
    assert_trained_alike,
    batch,
    check_counters,
    check_scenario,
    model_of,
    train,
)
from tests.support.compatibility import compat


def test_a_scheduler_of_learning_rates_and_betas() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
        for seed in range(8):
            train(model, optimizer, [seed])
            scheduler.step()

    assert check_scenario(scenario)["buckets_committed"] > 0


@pytest.mark.parametrize(
    "changed",
    [{"betas": (0.8, 0.99)}, {"eps": 1e-3}, {"weight_decay": 0.3}, {"lr": 0.0}, {"maximize": True}],
)
def test_hyper_parameters_changed_after_backward(changed: dict[str, Any]) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(3))
        optimizer.zero_grad()
        batch(model, 7).backward()
        optimizer.param_groups[0].update(changed)
        optimizer.step()
        train(model, optimizer, range(3))

    assert check_scenario(scenario)["buckets_undone"] == 1


@pytest.mark.parametrize(("before", "after"), [(None, 0.1), (0.1, None), (1e6, 0.1)])
def test_max_grad_norm_changed_after_backward(before: float | None, after: float | None) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(3))
        for seed in range(3):
            optimizer.max_grad_norm = before
            optimizer.zero_grad()
            batch(model, seed).backward()
            optimizer.max_grad_norm = after
            optimizer.step()

    check_scenario(scenario)


@compat("add_param_group at any time", "single", "stand_in")
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
