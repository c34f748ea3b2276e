"""Gradients that are added to after they were packed and freed, or set to zero: the bits of the host."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from tests.support.adamw_training import batch, grads_of, train
from tests.support.fake_cuda import Fake
from tests.support.freed_gradients import branches, check, clipped, images, on_the_device, taken_back

# ---- what autograd adds ---------------------------------------------------------------------------------------------


def windows(model: nn.Module, optimizer: AdamW) -> None:
    for window in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            batch(model, 10 * window + micro).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_windows_without_accumulate(fake: Fake, dtype: torch.dtype) -> None:
    check(fake, windows, dtype)


@pytest.mark.parametrize("options", [{"speculation": "never"}, {"speculation": "adaptive"}, {"bucket_numel": 100}])
def test_windows_in_every_mode(fake: Fake, options: dict[str, Any]) -> None:
    check(fake, windows, **options)


def test_only_the_first_window_is_a_surprise(fake: Fake) -> None:
    """Then it is known how many gradients make a step, and none is packed before the last."""

    def learned(model: nn.Module, optimizer: AdamW) -> None:
        windows(model, optimizer)
        with taken_back() as taken:
            windows(model, optimizer)
        assert not taken

    check(fake, learned)


def test_what_was_added_is_packed_and_freed_again(fake: Fake) -> None:
    def two(model: nn.Module, optimizer: AdamW) -> None:
        batch(model, 0).backward()
        batch(model, 1).backward()

    *_, freed = on_the_device(fake, two, torch.bfloat16)
    assert freed == 6


def test_a_window_that_is_told_brings_nothing_back(fake: Fake) -> None:
    def told(model: nn.Module, optimizer: AdamW) -> None:
        for window in range(3):
            optimizer.zero_grad()
            with optimizer.accumulate():
                batch(model, 10 * window).backward()
            batch(model, 10 * window + 1).backward()
            optimizer.step()

    with taken_back() as taken:
        check(fake, told, told=False)
    assert not taken


def test_the_same_graph_twice(fake: Fake) -> None:
    def twice(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            loss = batch(model, seed)
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
            optimizer.step()

    check(fake, twice)


def test_windows_of_several_lengths_with_a_learning_rate_that_changes(fake: Fake) -> None:
    def uneven(model: nn.Module, optimizer: AdamW) -> None:
        for window, length in enumerate((2, 1, 3, 1)):
            optimizer.zero_grad()
            for micro in range(length):
                batch(model, 10 * window + micro).backward()
                optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()

    check(fake, uneven)


def test_a_backward_without_zero_grad_adds_to_the_step_before(fake: Fake) -> None:
    def kept(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(4):
            batch(model, seed).backward()
            optimizer.step()

    check(fake, kept)


@pytest.mark.parametrize("cleared", [False, True])
def test_buckets_that_are_laid_out_anew(fake: Fake, cleared: bool) -> None:
    """What is still shown of the step before is copied before that."""

    def kept(model: nn.Module, optimizer: AdamW) -> list[Any]:
        found = []
        for seed in range(4):
            if cleared:
                optimizer.zero_grad()
            batch(model, seed).backward()
            before = optimizer._engine.buckets
            optimizer.step()
            found.append([grad.clone() for grad in grads_of(model)])
            if seed == 0 and cleared:
                optimizer.zero_grad()
                assert optimizer._engine.buckets is not before
            elif seed == 1:
                next(model.parameters()).grad = None
        return found

    check(fake, kept, make=branches)


def test_parameters_in_another_order_of_memory(fake: Fake) -> None:
    def read(model: nn.Module, optimizer: AdamW) -> list[Any]:
        windows(model, optimizer)
        return [(grad.stride(), grad.clone(), grad.stride()) for grad in grads_of(model)]

    check(fake, read, torch.float32, make=images)


def test_a_parameter_without_a_new_gradient_is_stepped_with_the_old_one(fake: Fake) -> None:
    def partly(model: Any, optimizer: AdamW) -> None:
        for seed in range(4):
            if seed % 2:
                fake.synchronize()
                model[3](torch.ones(2, 48, dtype=model[3].weight.dtype)).square().sum().backward()
            else:
                batch(model, seed).backward()
            optimizer.step()

    check(fake, partly)


def test_steps_one_after_the_other(fake: Fake) -> None:
    def several(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(2):
            optimizer.zero_grad()
            batch(model, seed).backward()
            for _ in range(3):
                optimizer.step()

    check(fake, several)


def test_a_backward_that_records_a_graph(fake: Fake) -> None:
    def recorded(model: nn.Module, optimizer: AdamW) -> None:
        for window in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                batch(model, 10 * window + micro).backward(create_graph=True)
            optimizer.step()
        optimizer.zero_grad()

    check(fake, recorded)


def test_backwards_in_threads(fake: Fake) -> None:
    def threads(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            losses = [batch(model, 10 * seed + i) for i in range(2)]
            for loss in losses:
                thread = threading.Thread(target=loss.backward)
                thread.start()
                for grad in grads_of(model):
                    grad.shape  # noqa: B018 - while the other thread packs, frees and adds
                thread.join()
            optimizer.step()

    check(fake, threads)


# ---- set to zero ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_gradients_that_are_set_to_zero(fake: Fake, whose: str) -> None:
    def zeroed(model: Any, optimizer: AdamW) -> list[Tensor]:
        found = []
        for seed in range(4):
            (optimizer if whose == "optimizer" else model).zero_grad(set_to_none=False)
            if seed == 3:
                found = [grad.clone() for grad in grads_of(model)]
            fake.synchronize()
            if seed % 2:  # the others are stepped with a gradient of zeros
                model[3](torch.ones(2, 48, dtype=model[3].weight.dtype)).square().sum().backward()
            else:
                batch(model, seed).backward()
            optimizer.step()
        return found

    check(fake, zeroed, told=False)


def test_a_gradient_set_to_zero_needs_no_memory(fake: Fake) -> None:
    def zeroed(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad(set_to_none=False)

    *_, freed = on_the_device(fake, zeroed, torch.bfloat16)
    assert freed == 6


def test_gradients_set_to_zero_between_backward_and_step(fake: Fake) -> None:
    def zeroed(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        batch(model, 3).backward()
        grads_of(model)[0].zero_()
        torch.zero_(grads_of(model)[2])
        torch._foreach_zero_(grads_of(model)[3:5])
        optimizer.step()

    check(fake, zeroed)


# ---- between steps --------------------------------------------------------------------------------------------------


def test_a_step_that_is_given_up(fake: Fake) -> None:
    def given_up(model: nn.Module, optimizer: AdamW) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            batch(model, seed).backward()
            clipped(model)
            if seed % 2:
                batch(model, 10 + seed).backward()
                optimizer.step()

    check(fake, given_up)


def test_state_saved_and_loaded_between_backward_and_step(fake: Fake) -> None:
    def saved(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(2))
        fake.synchronize()
        state = copy.deepcopy(optimizer.state_dict())
        for seed in (2, 3):
            optimizer.zero_grad()
            batch(model, seed).backward()
            if seed == 2:
                optimizer.state_dict()
            else:
                fake.synchronize()
                optimizer.load_state_dict(state)
            optimizer.step()
            batch(model, 20 + seed).backward()
            optimizer.step()

    check(fake, saved)


def test_a_group_that_is_added(fake: Fake) -> None:
    """Its buckets are attached beside those whose gradients are still shown."""

    def grown(model: Any, optimizer: AdamW) -> None:
        more = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            more.weight.fill_(0.5)
        batch(model, 0).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [more.weight]})
        for _ in range(2):
            fake.synchronize()
            more(model(torch.ones(2, 16, dtype=torch.bfloat16))).square().sum().backward()
            optimizer.step()

    check(fake, grown)
