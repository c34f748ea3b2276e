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
from tests.support.freed_gradients import Program, branches, check, clipped, images, on_the_device, taken_back

# ---- what autograd adds ---------------------------------------------------------------------------------------------


def windows(model: nn.Module, optimizer: AdamW) -> None:
    for window in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            batch(model, 10 * window + micro).backward()
        optimizer.step()


def uneven(model: nn.Module, optimizer: AdamW) -> None:
    """Windows of several lengths, with a learning rate that changes."""
    for window, length in enumerate((2, 1, 3, 1)):
        optimizer.zero_grad()
        for micro in range(length):
            batch(model, 10 * window + micro).backward()
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()


def same_graph_twice(model: nn.Module, optimizer: AdamW) -> None:
    for seed in range(3):
        optimizer.zero_grad()
        loss = batch(model, seed)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()


def without_zero_grad(model: nn.Module, optimizer: AdamW) -> None:
    """A backward adds to the gradients of the steps before, and steps follow one another."""
    for seed in range(3):
        batch(model, seed).backward()
        for _ in range(2):
            optimizer.step()


def partly(model: Any, optimizer: AdamW) -> None:
    """A parameter without a new gradient is stepped with the old one."""
    for seed in range(4):
        if seed % 2:
            last_layer(model).backward()
        else:
            batch(model, seed).backward()
        optimizer.step()


def last_layer(model: Any) -> Tensor:
    """The loss of this layer alone."""
    in_order(model)
    loss: Tensor = model[3](torch.ones(2, 48, dtype=model[3].weight.dtype)).square().sum()
    return loss


def in_order(model: Any) -> None:
    """A forward waits for the stand-in's current stream."""
    model(torch.ones(2, 16, dtype=model[0].weight.dtype))


def recorded(model: nn.Module, optimizer: AdamW) -> None:
    """Backwards that record a graph."""
    for window in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            batch(model, 10 * window + micro).backward(create_graph=True)
        optimizer.step()
    optimizer.zero_grad()


def in_threads(model: nn.Module, optimizer: AdamW) -> None:
    for seed in range(3):
        optimizer.zero_grad()
        for loss in [batch(model, 10 * seed + i) for i in range(2)]:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            for grad in grads_of(model):
                grad.shape  # noqa: B018 - while the other thread packs, frees and adds
            thread.join()
        optimizer.step()


def given_up(model: nn.Module, optimizer: AdamW) -> None:
    """Every second step."""
    for seed in range(4):
        optimizer.zero_grad()
        batch(model, seed).backward()
        clipped(model)
        if seed % 2:
            batch(model, 10 + seed).backward()
            optimizer.step()


def saved_and_loaded(model: nn.Module, optimizer: AdamW) -> None:
    """Between backward and step."""
    train(model, optimizer, range(2))
    in_order(model)
    state = copy.deepcopy(optimizer.state_dict())
    for seed in (2, 3):
        optimizer.zero_grad()
        batch(model, seed).backward()
        if seed == 2:
            optimizer.state_dict()
        else:
            in_order(model)
            optimizer.load_state_dict(state)
        optimizer.step()
        batch(model, 20 + seed).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "program",
    [uneven, same_graph_twice, without_zero_grad, partly, recorded, in_threads, given_up, saved_and_loaded],
)
def test_programs_that_add_to_packed_gradients(fake: Fake, program: Program) -> None:
    check(fake, program)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"speculation": "never"}),
        (torch.float16, {"speculation": "adaptive"}),
        (torch.bfloat16, {"bucket_numel": 100}),
    ],
)
def test_windows_without_accumulate(fake: Fake, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(fake, windows, dtype, **options)


def test_only_the_first_window_is_a_surprise(fake: Fake) -> None:
    """Then it is known how many gradients make a step, and none is packed before the last."""

    def learned(model: nn.Module, optimizer: AdamW) -> None:
        windows(model, optimizer)
        with taken_back() as taken:
            windows(model, optimizer)
        assert not taken

    check(fake, learned)


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


def test_what_was_added_or_set_to_zero_takes_no_memory(fake: Fake) -> None:
    def two(model: nn.Module, optimizer: AdamW) -> None:
        batch(model, 0).backward()
        batch(model, 1).backward()

    def zeroed(model: nn.Module, optimizer: AdamW) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad(set_to_none=False)

    for program in (two, zeroed):
        *_, freed = on_the_device(fake, program, torch.bfloat16)
        assert freed == 6


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
            more(model(torch.ones(2, 16, dtype=torch.bfloat16))).square().sum().backward()
            optimizer.step()

    check(fake, grown)


# ---- set to zero ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_gradients_that_are_set_to_zero(fake: Fake, whose: str) -> None:
    def zeroed(model: Any, optimizer: AdamW) -> list[Tensor]:
        found = []
        for seed in range(4):
            (optimizer if whose == "optimizer" else model).zero_grad(set_to_none=False)
            if seed == 3:
                found = [grad.clone() for grad in grads_of(model)]
            # The parameters of the other layers are stepped with a gradient of zeros.
            (last_layer(model) if seed % 2 else batch(model, seed)).backward()
            optimizer.step()
        return found

    check(fake, zeroed, told=False)


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
