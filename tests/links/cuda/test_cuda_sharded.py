"""DTensors of fully_shard and on meshes over a device: gradients are freed as they are packed, edits are noticed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from superoffload import AdamW
from tests.support.adamw_training import grads_of
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.fake_cuda_training import LATE, NEEDED_AGAIN, seen
from tests.support.meshes import LAYOUTS, laid_out, loss_of, options_of, rows
from tests.support.rank_processes import error_of, flat_mesh, net, on_ranks, optimizer_of, shard, tokens_of

Outcome = tuple[Any, dict[str, str], int]  # what was read, digests, how often one was told that gradients came back
HOW = {"fully_shard": ("plain", "zeroed", "clipped", "edited", "read", "again"), "tp2 sp": ("plain", "clipped", "read")}


@pytest.fixture(autouse=True)
def _compiled(fake: Fake) -> None:
    """Here, not by two ranks at once."""


# ---- the bits of the host -------------------------------------------------------------------------------------------


def sharded() -> tuple[AbstractContextManager[AdamW], Callable[[int], torch.Tensor]]:
    model: Any = shard(net(torch.bfloat16, layers=2), flat_mesh())
    made = optimizer_of(model, rank_check="off")  # it reads parameters at once
    return made, lambda seed: model.loss(tokens_of(seed, dist.get_rank()))


def on_mesh(name: str) -> tuple[AbstractContextManager[AdamW], Callable[[int], torch.Tensor]]:
    model: Any = laid_out(LAYOUTS[name], torch.bfloat16)
    made = AdamW(model.parameters(), **options_of(model, {"max_grad_norm": 1.0, "rank_check": "off"}))
    return made, lambda seed: loss_of(model, seed, rows(LAYOUTS[name], dist.get_rank()))


def in_rank(name: str) -> dict[str, tuple[Outcome, Outcome]]:
    """Over the host link and over the device."""
    return {how: (outcome(name, how, False), outcome(name, how, True)) for how in HOW[name]}


def outcome(name: str, how: str, on_device: bool) -> Outcome:
    fake = Fake()
    fake.delays(3, LATE)
    with on_fake_device(fake) if on_device else on_host(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made, loss = sharded() if name == "fully_shard" else on_mesh(name)
        with made as optimizer:
            found = trained(optimizer, loss, how, fake.synchronize)
            fake.synchronize()
            return found, optimizer.state_digests(), sum(NEEDED_AGAIN in str(one.message) for one in caught)


def trained(
    optimizer: AdamW, loss: Callable[[int], torch.Tensor], how: str, synchronize: Callable[[], None]
) -> list[Any]:
    """``synchronize``: before parameters are gathered, which a device would do behind its stream."""
    found: list[Any] = []
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for window in range(2):
        optimizer.zero_grad(set_to_none=how != "zeroed")
        for micro in range(1 if how in ("plain", "clipped") else 2):
            synchronize()
            loss(10 * window + micro).backward()
        grads: list[Any] = [param.grad for param in params if param.grad is not None]
        if how == "clipped":
            nn.utils.clip_grad_value_(params, 0.01)
        if how == "edited":
            torch._foreach_mul_(grads, 0.5)
        if how == "read":
            found.append(seen([grad.full_tensor().norm() for grad in grads if hasattr(grad, "full_tensor")]))
        optimizer.step()
        if how == "again":
            optimizer.step()
        if how == "read":
            found.append(seen([getattr(param.grad, "_local_tensor", param.grad).norm() for param in params]))
    return found


@pytest.mark.parametrize("name", HOW)
def test_the_bits_of_the_host(name: str) -> None:
    ranks = 2 if name == "fully_shard" else LAYOUTS[name].ranks
    for rank in on_ranks(ranks, in_rank, name):
        for how, (expected, found) in rank.items():
            assert found[:2] == expected[:2], how
            if name == "fully_shard":
                assert found[2] == (how != "plain"), how
            elif how == "plain":
                assert not found[2], "no gradient was brought back"


def spread_in_rank() -> list[str]:
    """Each rank packs its part of a gradient, and frees all of it."""
    fake = Fake()
    with on_fake_device(fake):
        model = net(torch.bfloat16)
        with optimizer_of(model, rank_check="off", replicated="shard") as optimizer:
            for _ in range(2):
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            errors = [error_of(grads_of(model)[0].norm)]
            optimizer.zero_grad(set_to_none=False)
            assert not grads_of(model)[0].any()
            optimizer.step()
            fake.synchronize()
            return errors


def test_a_part_of_a_gradient_is_not_taken_for_all_of_it() -> None:
    for (error,) in on_ranks(2, spread_in_rank):
        assert "this rank has packed a part of it" in error and "keep_grads=True" in error
