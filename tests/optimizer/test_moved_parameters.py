"""Parameters that are not where they should be: a clear error, and the state as after the last committed step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from superoffload import AdamW
from superoffload.errors import ArgumentError, StateError
from tests.support.adamw_training import batch, model_of, pair, train


def on_a_gpu(numel: int = 8) -> nn.Parameter:
    """As far as shapes and devices go."""
    with FakeTensorMode():
        return nn.Parameter(torch.empty(numel, device="cuda"))


def test_parameters_on_several_devices_are_refused() -> None:
    message = "on cuda:0, while parameters before it are on cpu; expected one device per optimizer"
    with pytest.raises(ArgumentError, match=message):
        AdamW([nn.Parameter(torch.zeros(8)), on_a_gpu()])
    with pair() as (model, optimizer, twin, plain):
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        batch(model, 2).backward()
        with pytest.raises(ArgumentError, match=message):
            optimizer.add_param_group({"params": [on_a_gpu()]})
        assert len(optimizer.param_groups) == 1
        optimizer.step()
        train(twin, plain, range(3))
        assert optimizer.state_digests() == plain.state_digests()


def moved(model: nn.Module, optimizer: AdamW) -> None:
    """Its device is what we remember of it: there is no other one here."""
    for param in model.parameters():
        optimizer._parts.params[param].device = torch.device("cuda:0")
        param.data = param.data.clone()


def resized(model: nn.Module, _: AdamW) -> None:
    for param in model.parameters():
        param.data, param.grad = torch.zeros(5), torch.zeros(5)


@pytest.mark.parametrize(
    ("change", "in_flight", "words", "delivery"),
    [
        (moved, False, "was on cuda:0, now on cpu; make the optimizer after moving the model", "on_demand"),
        (moved, True, "was on cuda:0, now on cpu; make the optimizer after moving the model", "eager"),
        (lambda model, _: model.bfloat16(), True, "make a new optimizer after converting or resizing", "on_demand"),
        (resized, False, "make a new optimizer after converting or resizing", "eager"),
    ],
)
def test_a_parameter_that_was_changed_is_refused(
    change: Callable[[nn.Module, AdamW], object], in_flight: bool, words: str, delivery: str
) -> None:
    model, twin = model_of(), model_of()
    options: dict[str, Any] = {"speculation": "always", "delivery": delivery, "module": model, "bucket_numel": 1024}
    with AdamW(model.parameters(), **options) as optimizer, AdamW(twin.parameters(), speculation="never") as plain:
        train(model, optimizer, range(3))
        train(twin, plain, range(3))
        optimizer.zero_grad()
        if in_flight:
            batch(model, 3).backward()
        change(model, optimizer)
        with pytest.raises(StateError, match=words):
            optimizer.step()
        optimizer.zero_grad()
        found, expected = optimizer.state_digests(), plain.state_digests()
        assert all(found[name] == expected[name] for name in ("master", "exp_avg", "exp_avg_sq"))
