"""Users write to parameters: between steps, between backward and step(), in place, by new storage, also so that no
version counter shows it. It is kept as by torch."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from superoffload import AdamW
from tests.support.adamw_training import Optimizer, batch, check_scenario, model_of, train
from tests.support.rank_processes import flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of

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


def sharded_run(hidden: bool) -> dict[str, str]:
    model = shard(net(torch.bfloat16), flat_mesh())
    with optimizer_of(model) as optimizer:
        for step in range(4):
            optimizer.zero_grad()
            model.loss(tokens_of(step, dist.get_rank())).backward()
            optimizer.step()
            params: list[Any] = list(model.parameters())
            for param in params:
                local: Tensor = param.to_local() if not hidden else param.to_local().data
                with torch.no_grad():
                    local.clamp_(-0.02, 0.02)
        return optimizer.state_digests()


def over_ranks() -> bool:
    return sharded_run(True) == sharded_run(False)


def test_every_rank_keeps_what_all_of_them_wrote() -> None:
    assert on_ranks(2, over_ranks) == [True] * 2
