"""DTensors on meshes over a device: gradients are freed as they are packed, also those that get another layout."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import grads_of
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.freed_gradients import NEEDED_AGAIN, seen
from tests.support.link_runs import LATE
from tests.support.meshes import LAYOUTS, laid_out, loss_of, options_of, rows
from tests.support.rank_processes import on_ranks

HOW = ["plain", "windows", "accumulate", "clipped", "edited", "read"]


def in_rank(name: str, how: str, on_device: bool) -> tuple[Any, dict[str, str], int]:
    fake = Fake()
    fake.delays(3, LATE)
    with on_fake_device(fake) if on_device else on_host(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model: Any = laid_out(LAYOUTS[name], torch.bfloat16)
        options = options_of(model, {"max_grad_norm": 1.0, "rank_check": "off"})  # it reads parameters at once
        with AdamW(model.parameters(), **options) as optimizer:
            found = trained(model, optimizer, name, how, fake)
            fake.synchronize()
            return found, optimizer.state_digests(), sum(NEEDED_AGAIN in str(one.message) for one in caught)


def trained(model: Any, optimizer: AdamW, name: str, how: str, fake: Fake) -> list[Any]:
    found, part = [], rows(LAYOUTS[name], dist.get_rank())
    for window in range(3):
        optimizer.zero_grad()
        if how == "accumulate":
            with optimizer.accumulate():
                fake.synchronize()
                loss_of(model, 10 * window + 1, part).backward()
        for micro in range(2 if how == "windows" else 1):
            fake.synchronize()
            loss_of(model, 10 * window + micro, part).backward()
        grads: list[Any] = grads_of(model)
        if how == "clipped":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        if how == "edited":
            for grad in grads:
                grad.mul_(0.5)
        if how == "read":
            found.append(seen([grad.full_tensor().norm() for grad in grads if hasattr(grad, "full_tensor")]))
        optimizer.step()
    return found


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["tp2 sp", "fsdp2 x tp2"])
def test_freed_gradients(name: str, how: str) -> None:
    Fake()  # compiled here, not by two ranks at once
    expected = on_ranks(LAYOUTS[name].ranks, in_rank, name, how, False)
    found = on_ranks(LAYOUTS[name].ranks, in_rank, name, how, True)
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    if how == "plain":
        assert not any(one[2] for one in found), "no gradient was brought back"
