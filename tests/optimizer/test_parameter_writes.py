"""Users write to parameters: between steps, between backward and step(), in place, by new storage, also so that no
version counter shows it. It is kept as by torch. Over ranks: tests/integrations/test_user_code_fsdp2.py."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from superoffload import AdamW
from tests.support.adamw_training import Optimizer, batch, check_scenario, model_of, train

pytestmark = pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")


def clamp(model: nn.Module) -> None:
    """As WGAN does."""
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)


def through_numpy(model: nn.Module) -> None:
    for param in model.parameters():
        array: Any = param.detach().numpy()
        array *= -1


def new_storage_twice(model: nn.Module) -> None:
    """The second one may get the address of the first."""
    for param in model.parameters():
        param.data = param.detach() * 2
        param.data = param.detach() * 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unseen_writes_are_kept(dtype: torch.dtype) -> None:
    """Between steps, between two backwards, between backward and step(). More of these: tests/fuzz."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for write in (new_storage_twice, through_numpy if dtype is torch.float32 else clamp):
            train(model, optimizer, range(2))
            optimizer.zero_grad()
            write(model)
            with optimizer.accumulate():
                batch(model, 7).backward()
            write(model)
            batch(model, 8).backward()
            write(model)
            optimizer.step()
        train(model, optimizer, range(2))

    check_scenario(scenario, dtype, bucket_numel=1024)


def test_one_warning_and_none_without_a_write() -> None:
    model = model_of()
    with warnings.catch_warnings(record=True) as caught, AdamW(model.parameters()) as optimizer:
        warnings.simplefilter("always")
        train(model, optimizer, range(3))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        train(model, optimizer, range(2))
        assert not caught
        for step in range(3):
            clamp(model)
            train(model, optimizer, [step])
    (warning,) = caught
    assert "param_groups[0]['params'][0] and " in str(warning.message)
    assert "refresh_masters()" in str(warning.message)


def test_memory_that_a_user_lets_go_of_is_free() -> None:
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        train(model, optimizer, range(2))
        param = next(model.parameters())
        old = StorageWeakRef(param.untyped_storage())
        param.data = torch.zeros_like(param)
        gc.collect()
        assert old.expired()
