"""Gradients that are dropped, edited, replaced or set by hand between backward and step(): the step is torch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from tests.support.adamw_training import (
    Optimizer,
    batch,
    check_counters,
    check_scenario,
    grads_of,
    model_of,
    nothing_shows,
    train,
)
from tests.support.compatibility import compat
from tests.support.over_stand_in import SOMETIMES_SLOWER


def user_zero_grad(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def user_zero_grad_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def user_model_zero_grad(model: nn.Module, optimizer: Optimizer) -> None:
    model.zero_grad()


def user_model_zero_grad_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    model.zero_grad(set_to_none=False)


ZEROING = [user_zero_grad, user_zero_grad_in_place, user_model_zero_grad, user_model_zero_grad_in_place]


@pytest.mark.parametrize("zero", [user_zero_grad, user_model_zero_grad_in_place])
def test_gradients_dropped_without_a_step(zero: Callable[[nn.Module, Optimizer], None]) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        for seed in range(4):
            zero(model, optimizer)
            batch(model, seed).backward()
            if seed % 2:
                optimizer.step()

    stats = check_scenario(scenario)
    assert stats["buckets_abandoned"] + stats["buckets_undone"] >= 2


@compat("zero_grad(set_to_none=True or False)", "single", "stand_in")
@pytest.mark.parametrize("zero", ZEROING)
def test_gradients_dropped_between_backward_and_step(zero: Callable[[nn.Module, Optimizer], None]) -> None:
    """Gone: no step. Zero: a step with zeros, which moves by momentum."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        batch(model, 5).backward()
        zero(model, optimizer)
        optimizer.step()
        train(model, optimizer, range(2))

    check_scenario(scenario)


def test_zero_grad_without_step_gives_back_the_state() -> None:
    model = model_of(torch.bfloat16)
    with AdamW(model.parameters(), speculation="always") as optimizer:
        train(model, optimizer, range(3))
        before = optimizer.state_digests()
        with nothing_shows(model):
            batch(model, 9).backward()
            optimizer.zero_grad()
        assert optimizer.state_digests() == before
        assert optimizer.stats()["buckets_abandoned"] == 1
        check_counters(optimizer)


def clip_by_hand(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def scale_one(model: nn.Module) -> None:
    grads_of(model)[0].mul_(3.0)


def add_noise_to_an_element(model: nn.Module) -> None:
    grads_of(model)[2].view(-1)[3] += 1.0


def replace_by_a_transposed_one(model: nn.Module) -> None:
    next(model.parameters()).grad = torch.arange(48 * 16.0).view(16, 48).t()


def drop_one(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def make_one_infinite_then_good(model: nn.Module) -> None:
    grads_of(model)[0].fill_(math.inf)
    grads_of(model)[0].fill_(0.25)


EDITS = [
    clip_by_hand,
    clip_values,
    scale_one,
    add_noise_to_an_element,
    replace_by_a_transposed_one,
    drop_one,
    make_one_infinite_then_good,
]


@compat("clip_grad_value_ by the user after backward", "single")
@compat("clip_grad_value_ by the user after backward", "stand_in", note=SOMETIMES_SLOWER)
@compat("gradients edited, replaced or removed before step()", "single")
@compat("gradients edited, replaced or removed before step()", "stand_in", note=SOMETIMES_SLOWER)
@pytest.mark.parametrize("edit", EDITS)
def test_gradients_edited_after_backward(edit: Callable[[nn.Module], None]) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        for seed in range(3):
            optimizer.zero_grad()
            batch(model, seed).backward()
            edit(model)
            optimizer.step()
        train(model, optimizer, range(2))

    stats = check_scenario(scenario, bucket_numel=1024)
    assert stats["buckets_undone"] > 0


def test_gradients_set_by_hand_without_any_backward() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()

    check_scenario(scenario, max_grad_norm=2.0)


def test_a_hook_that_takes_the_gradient_away() -> None:
    model = model_of()
    first, *_ = model.parameters()

    def take(param: Tensor) -> None:
        param.grad = None

    first.register_post_accumulate_grad_hook(take)  # before the optimizer's own
    with AdamW(model.parameters(), speculation="always") as optimizer:
        before = first.detach().clone()
        batch(model, 0).backward()
        optimizer.step()
        assert torch.equal(first, before)
        assert float(optimizer.state[first]["step"]) == 0
