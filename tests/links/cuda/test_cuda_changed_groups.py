"""Changed groups and edited state over the fake driver: gradients that were freed come back, and all bits stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import batch, train
from tests.support.fake_cuda import Fake
from tests.support.fake_cuda_training import check_against_host, moves_behind_the_stream
from tests.support.link_runs import LATE


@pytest.fixture(autouse=True)
def _moves(fake: Fake) -> Iterator[None]:
    with moves_behind_the_stream(fake):
        yield


def regrouped(model: nn.Module, optimizer: AdamW) -> None:
    """Before a step, with its gradients packed, and between two."""
    optimizer.zero_grad()
    batch(model, 2).backward()
    first = optimizer.param_groups[0]
    optimizer.param_groups.append({**first, "params": [first["params"].pop(0)], "lr": 0.05})
    optimizer.step()
    train(model, optimizer, [3])
    optimizer.param_groups.reverse()
    train(model, optimizer, [4])
    taken_out = optimizer.param_groups[1]["params"].pop()
    train(model, optimizer, [5])
    optimizer.param_groups[0]["params"].append(taken_out)
    train(model, optimizer, range(6, 8))


def edited(model: nn.Module, optimizer: AdamW) -> None:
    for seed in range(2, 6):
        optimizer.zero_grad()
        batch(model, seed).backward()
        for param in list(model.parameters())[seed % 2 :: 2]:
            optimizer.state[param]["exp_avg"] = 0.5 * optimizer.state[param]["exp_avg"]
        if seed == 4:
            optimizer.state.clear()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"placement": {"gpu_fraction": 0.5}}, {"keep_grads": True}], ids=str)
@pytest.mark.parametrize("code", [regrouped, edited])
def test_the_bits_are_those_of_the_host(fake: Fake, code: Any, options: dict[str, Any]) -> None:
    for seed in range(2):
        fake.delays(seed, LATE)
        check_against_host(fake, code, **options)
    assert fake.mismatches == 0
