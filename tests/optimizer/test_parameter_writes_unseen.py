"""Writes to parameters that no version counter shows, as through ``.data``: kept as by torch, with one warning."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from superoffload import AdamW
from superoffload.errors import StateError
from superoffload.host.bits import SumsByTorch
from superoffload.optimizer.advice import Advice
from superoffload.optimizer.bit_compare_interval import EVERY, FIRST_STEPS, BitCompareInterval
from superoffload.optimizer.tracked_param import Place
from tests.support.adamw_training import Optimizer, batch, check_scenario, model_of, train
from tests.support.rank_processes import flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:superoffload. .* changed without autograd's version counters")


def clamp(model: nn.Module) -> None:
    """As WGAN does."""
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)


def one_element(model: nn.Module) -> None:
    next(model.parameters()).data.view(-1)[7] = 0.5


def through_numpy(model: nn.Module) -> None:
    for param in model.parameters():
        if param.dtype is torch.float32:
            array: Any = param.detach().numpy()
            array *= -1
        else:
            param.data.neg_()


def new_storage_twice(model: nn.Module) -> None:
    """The second one may get the address of the first."""
    for param in model.parameters():
        param.data = param.detach() * 2
        param.data = param.detach() * 0.25


@pytest.mark.parametrize("when", ["between steps", "between backward and step", "between two backwards"])
@pytest.mark.parametrize("write", [one_element, through_numpy, new_storage_twice])
def test_they_are_kept(write: Callable[[nn.Module], None], when: str) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for _ in range(2):
            train(model, optimizer, range(2))
            optimizer.zero_grad()
            if when == "between steps":
                write(model)
            elif when == "between two backwards":
                with optimizer.accumulate():
                    batch(model, 7).backward()
                write(model)
            batch(model, 8).backward()
            if when == "between backward and step":
                write(model)
            optimizer.step()
        train(model, optimizer, range(2))

    for dtype in (torch.float32, torch.bfloat16):
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


def test_a_frozen_parameter_and_one_without_a_gradient() -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    params[2].requires_grad_(False)
    with AdamW(params, lr=0.0, weight_decay=0.0) as optimizer:
        for step in range(3):
            for param in params:
                param.data.fill_(step)
            params[step % 2].grad = torch.ones(4)
            optimizer.step()
            optimizer.zero_grad()
            assert all(torch.equal(param, torch.full((4,), float(step))) for param in params)


def test_a_write_before_the_value_is_delivered_is_reported() -> None:
    model = model_of()
    options: dict[str, Any] = {"delivery": "on_demand", "module": model, "bucket_numel": 1024}
    with AdamW(model.parameters(), **options) as optimizer:
        train(model, optimizer, range(3))
        weight = model.get_parameter("3.weight")
        weight.data.fill_(0.25)
        with pytest.raises(StateError, match=r"written after step\(\), before the value of that step was delivered"):
            batch(model, 3)
        assert torch.equal(weight, torch.full_like(weight, 0.25))
        train(model, optimizer, [4])
        assert (weight - 0.25).abs().max() < 0.01


# ---- storage ------------------------------------------------------------------------------------------------------


def test_another_storage_at_the_same_address_is_another_place() -> None:
    memory = bytearray(64)
    for _ in range(20):
        old = torch.frombuffer(memory, dtype=torch.float32)
        place, address = Place(old), old.data_ptr()
        assert place.is_of(old)
        del old  # its record, too, may be where the next one is
        new = torch.frombuffer(memory, dtype=torch.float32)
        assert new.data_ptr() == address and not place.is_of(new)
    place = Place(new)
    assert place.is_of(new.view(16)) and not place.is_of(new[1:]) and not place.is_of(new.view(4, 4).t())


def test_memory_that_a_user_lets_go_of_is_free() -> None:
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        train(model, optimizer, range(2))
        param = next(model.parameters())
        old = StorageWeakRef(param.untyped_storage())
        param.data = torch.zeros_like(param)
        gc.collect()
        assert old.expired()


# ---- ranks --------------------------------------------------------------------------------------------------------


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


# ---- on a device --------------------------------------------------------------------------------------------------


def test_when_bits_on_a_device_are_compared() -> None:
    interval = BitCompareInterval(Advice())
    steps = []
    for step in range(1, 3 * EVERY):
        if interval.on_device:
            steps.append(step)
        interval.step_ended()
    assert steps == [*range(1, FIRST_STEPS + 1), EVERY, 2 * EVERY]


def test_parameters_that_cannot_be_read_yet_are_not_compared() -> None:
    """Those of a link that writes later into host memory; of those on a device, some steps."""
    model = model_of()
    with AdamW(model.parameters()) as optimizer:
        tracked = next(iter(optimizer._parts.params))
        assert tracked.is_compared(on_device=False)
        tracked.bits = SumsByTorch()
        assert tracked.is_compared(on_device=True) and not tracked.is_compared(on_device=False)
        tracked.readable = False
        assert not tracked.is_compared(on_device=True)
