"""Gradients are freed once they are packed: whoever would use them learns it. Those that are kept may be edited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.errors import ArgumentError, StateError
from superoffload.packed_gradient import PackedGradient
from tests.adamw_tools import batch, model_of
from tests.cuda_tools import check_against_host, host_digests, training
from tests.fake_cuda import Fake


def _clip(model: nn.Module, _: AdamW) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _scale_by_hand(model: nn.Module, _: AdamW) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def _second_backward(model: nn.Module, _: AdamW) -> None:
    batch(model, 3).backward()


def _scaler(model: nn.Module, optimizer: AdamW) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)


def _second_step(_: nn.Module, optimizer: AdamW) -> None:
    optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("use", [_clip, _scale_by_hand, _second_backward, _scaler, _second_step])
def test_using_a_freed_gradient_is_an_error(fake: Fake, use: Callable[[nn.Module, AdamW], None]) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        assert all(isinstance(parameter.grad, PackedGradient) for parameter in model.parameters())
        with pytest.raises(StateError, match=r"max_grad_norm.*accumulate.*keep_grads=True"):
            use(model, optimizer)


def test_what_stands_in_for_a_gradient_goes_with_zero_grad(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        for set_to_none in (True, False):
            optimizer.zero_grad()
            batch(model, 2).backward()
            assert "packed and freed" in repr(next(model.parameters()).grad)
            optimizer.zero_grad(set_to_none)
            assert all(parameter.grad is None for parameter in model.parameters())
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(2)), "steps that were never taken"


def test_a_gradient_that_is_taken_away_is_not_stepped(fake: Fake) -> None:
    def without_first(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        batch(model, 2).backward()
        next(model.parameters()).grad = None
        optimizer.step()

    check_against_host(fake, without_first)


def test_model_zero_grad_and_another_backward(fake: Fake) -> None:
    """The first backward's gradients are gone: only the second counts."""
    with training(fake) as (model, optimizer):
        batch_of_another_step = 7
        model.zero_grad()
        batch(model, batch_of_another_step).backward()
        model.zero_grad()
        batch(model, 2).backward()
        optimizer.step()
        fake.synchronize()
        assert optimizer.state_digests() == host_digests(range(3))


def test_accumulated_gradients(fake: Fake) -> None:
    def window(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        with optimizer.accumulate():
            batch(model, 10).backward()
        batch(model, 11).backward()
        optimizer.step()

    check_against_host(fake, window)


def test_kept_gradients_may_be_edited(fake: Fake) -> None:
    def edited(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    check_against_host(fake, edited, keep_grads=True)


@pytest.mark.parametrize("value", [0, "no", 1.5])
def test_keep_grads_is_checked(value: Any) -> None:
    with pytest.raises(ArgumentError, match="keep_grads"):
        AdamW(model_of().parameters(), keep_grads=value)
