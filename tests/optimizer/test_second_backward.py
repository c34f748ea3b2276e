"""Whatever happens to gradients between backward and step(): the step is right, and until then nothing shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from tests.support.adamw_training import (
    DTYPES,
    Optimizer,
    assert_trained_alike,
    batch,
    check_counters,
    check_scenario,
    model_of,
    run_ours,
    train,
    weights,
)
from tests.support.compatibility import compat
from tests.support.over_stand_in import SLOWER, SOMETIMES_SLOWER


@contextmanager
def nothing_shows(model: nn.Module) -> Any:
    """No parameter changes its bits or its version inside."""
    before = [(p.detach().clone(), p._version, p.data_ptr()) for p in model.parameters()]
    yield
    for param, (value, version, address) in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.detach(), value)
        assert param._version == version
        assert param.data_ptr() == address


# ---- promise 4: only step() changes a parameter -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_shows_before_step(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    with AdamW(model.parameters(), lr=0.1, speculation="always") as optimizer:
        for seed in range(3):
            optimizer.zero_grad()
            with nothing_shows(model):
                batch(model, seed).backward()
                assert optimizer.stats()["buckets_speculated"] == seed + 1, "the workers are at it already"
                for bucket in optimizer._core.buckets:
                    assert bucket.running is not None
                    bucket.running.wait()
            versions = [p._version for p in model.parameters()]
            before = weights(model)
            optimizer.step()
            assert all(p._version > version for p, version in zip(model.parameters(), versions, strict=True))
            assert not torch.equal(weights(model), before)


def test_a_second_forward_sees_the_old_parameters() -> None:
    model = model_of()
    with AdamW(model.parameters(), lr=0.1, speculation="always") as optimizer:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        with nothing_shows(model):
            first = batch(model, 5)
            first.backward()
            for bucket in optimizer._core.buckets:
                assert bucket.running is not None
                bucket.running.wait()
            assert torch.equal(batch(model, 5), first)
        optimizer.step()
        assert not torch.equal(batch(model, 5), first)


def test_retain_graph() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        with nothing_shows(model):
            loss = batch(model, 5)
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
        optimizer.step()

    assert check_scenario(scenario)["buckets_undone"] > 0


def test_a_retained_graph_cannot_be_used_after_step() -> None:
    """Its saved parameters were changed in place, which autograd notices by the version."""
    model = model_of()
    with AdamW(model.parameters(), speculation="always") as optimizer:
        loss = batch(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_backward_that_records_a_graph() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            batch(model, seed).backward(create_graph=True)
            optimizer.step()
        for param in model.parameters():
            param.grad = None

    with pytest.warns(UserWarning, match="create_graph"):
        check_scenario(scenario)


# ---- several backward passes --------------------------------------------------------------------------------------


@compat("gradient accumulation", "single")
@compat("gradient accumulation", "stand_in", note=SLOWER)
@pytest.mark.parametrize("bucket_numel", [None, 1024])
def test_a_second_backward_adds_up(bucket_numel: int | None) -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for step, passes in enumerate([1, 2, 2, 1, 3, 2, 1]):
            optimizer.zero_grad()
            for micro in range(passes):
                batch(model, 10 * step + micro).backward()
            optimizer.step()

    stats = check_scenario(scenario, bucket_numel=bucket_numel)
    assert stats["buckets_undone"] > 0
    assert stats["buckets_committed"] > 0, "as many passes as last time: the last one is taken for the boundary"


@compat("gradient accumulation with accumulate()", "single", "stand_in")
def test_accumulate() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for step in range(4):
            optimizer.zero_grad()
            with optimizer.accumulate():
                for micro in range(3):
                    batch(model, 10 * step + micro).backward()
            batch(model, 10 * step + 9).backward()
            optimizer.step()

    stats = check_scenario(scenario)
    assert stats["buckets_undone"] == 0
    assert stats["buckets_committed"] == 4


def test_accumulate_packs_nothing() -> None:
    model = model_of()
    with AdamW(model.parameters(), speculation="always") as optimizer:
        with optimizer.accumulate():
            batch(model, 0).backward()
            with optimizer.accumulate():
                batch(model, 1).backward()
            batch(model, 2).backward()
            assert optimizer.stats()["bytes_down"] == 0
        batch(model, 3).backward()
        assert optimizer.stats()["bytes_down"] > 0


def test_accumulate_ends_with_an_exception_inside() -> None:
    model = model_of()
    with AdamW(model.parameters(), speculation="always") as optimizer:
        with pytest.raises(ZeroDivisionError), optimizer.accumulate():
            _ = 1 / 0
        batch(model, 0).backward()
        optimizer.step()
        assert optimizer.stats()["buckets_committed"] == 1


def test_more_gradient_after_the_boundary() -> None:
    """accumulate() around a backward that comes last."""

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            batch(model, seed).backward()
            with optimizer.accumulate():
                batch(model, seed + 50).backward()
            optimizer.step()

    assert check_scenario(scenario)["buckets_undone"] > 0


def test_only_accumulating_backward_passes() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            with optimizer.accumulate():
                batch(model, seed).backward()
            optimizer.step()

    assert check_scenario(scenario)["buckets_stepped"] == 3


def test_backward_over_parts_of_the_model() -> None:
    def scenario(model: Any, optimizer: Optimizer) -> None:
        for seed in range(6):
            optimizer.zero_grad()
            if seed % 3 == 1:
                model[0](torch.ones(2, 16)).square().mean().backward()
            elif seed % 3 == 2:
                model[3](torch.ones(2, 48)).square().mean().backward()
            else:
                batch(model, seed).backward()
            optimizer.step()

    check_scenario(scenario, bucket_numel=1024)


# ---- gradients that are dropped, edited, replaced -----------------------------------------------------------------


def user_zero_grad(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def user_zero_grad_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def user_model_zero_grad(model: nn.Module, optimizer: Optimizer) -> None:
    model.zero_grad()


def user_model_zero_grad_in_place(model: nn.Module, optimizer: Optimizer) -> None:
    model.zero_grad(set_to_none=False)


ZEROING = [user_zero_grad, user_zero_grad_in_place, user_model_zero_grad, user_model_zero_grad_in_place]


@pytest.mark.parametrize("zero", ZEROING)
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


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def clip_by_hand(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def scale_one(model: nn.Module) -> None:
    grads(model)[0].mul_(3.0)


def scale_all(model: nn.Module) -> None:
    for grad in grads(model):
        grad.div_(7.0)


def add_noise_to_an_element(model: nn.Module) -> None:
    grads(model)[2].view(-1)[3] += 1.0


def replace_one(model: nn.Module) -> None:
    next(model.parameters()).grad = torch.ones(48, 16)


def replace_by_a_transposed_one(model: nn.Module) -> None:
    next(model.parameters()).grad = torch.arange(48 * 16.0).view(16, 48).t()


def drop_one(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def drop_one_and_scale_another(model: nn.Module) -> None:
    drop_one(model)
    grads(model)[0].mul_(2.0)


def make_one_infinite_then_good(model: nn.Module) -> None:
    grads(model)[0].fill_(math.inf)
    grads(model)[0].fill_(0.25)


EDITS = [
    clip_by_hand,
    clip_values,
    scale_one,
    scale_all,
    add_noise_to_an_element,
    replace_one,
    replace_by_a_transposed_one,
    drop_one,
    drop_one_and_scale_another,
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


# ---- exceptions in user code --------------------------------------------------------------------------------------


def test_an_exception_between_backward_and_step() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        for seed in range(4):
            optimizer.zero_grad()
            try:
                batch(model, seed).backward()
                if seed % 2:
                    raise ValueError("the user's")
                optimizer.step()
            except ValueError:
                continue

    assert check_scenario(scenario)["buckets_abandoned"] == 2  # by zero_grad(), and the last one by close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("then_step", [False, True])
def test_an_exception_in_the_middle_of_backward(error: type[BaseException], then_step: bool) -> None:
    """With step() after it, the gradients that had arrived are applied, as in torch."""

    def scenario(model: Any, optimizer: Optimizer) -> None:
        train(model, optimizer, range(2))
        optimizer.zero_grad()

        def fail(grad: Tensor) -> None:
            raise error("the user's")

        handle = model[2].weight.register_hook(fail)
        with pytest.raises(error, match="the user's"):
            batch(model, 7).backward()
        handle.remove()
        if then_step:
            optimizer.step()
        train(model, optimizer, range(3))

    check_scenario(scenario, bucket_numel=1024)


# ---- loss scaling -------------------------------------------------------------------------------------------------


@compat("GradScaler", "single")
@compat("GradScaler", "stand_in", note=SLOWER)
@pytest.mark.parametrize("unscale_by_hand", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_grad_scaler(unscale_by_hand: bool, max_grad_norm: float | None) -> None:
    """Its unscale_() edits gradients without a trace in their version counters."""
    scales = []

    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        by_hand = unscale_by_hand or not isinstance(optimizer, AdamW)  # torch's clips what is unscaled
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for seed in range(10):
            optimizer.zero_grad()
            loss = batch(model, seed)
            scaler.scale(loss * math.inf if seed == 4 else loss).backward()
            if by_hand:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())

    stats = check_scenario(scenario, max_grad_norm=max_grad_norm)
    assert stats["skipped_steps"] == 1
    assert len(set(scales)) == 1
    if not unscale_by_hand and max_grad_norm is None:
        assert stats["buckets_committed"] > 0, "the scale of the last step was expected"


def test_grad_scaler_skips_although_the_infinity_was_replaced() -> None:
    model = model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with AdamW(model.parameters(), speculation="always") as optimizer, nothing_shows(model):
        scaler.scale(batch(model, 0) * math.inf).backward()
        scaler.unscale_(optimizer)
        for grad in grads(model):
            grad.nan_to_num_(0.0, 1.0, -1.0)
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.stats()["skipped_steps"] == 1
    assert scaler.get_scale() == 2.0


def test_fp16_parameters_train_with_a_scaler() -> None:
    def scenario(model: nn.Module, optimizer: Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        for seed in range(8):
            optimizer.zero_grad()
            scaler.scale(batch(model, seed)).backward()
            scaler.step(optimizer)
            scaler.update()

    digests = {}
    for mode in ("always", "never"):
        _, optimizer = run_ours(scenario, mode, torch.float16, max_grad_norm=1.0)
        assert optimizer.stats()["skipped_steps"] > 0, "the scale grows until something overflows"
        assert optimizer.stats()["steps"] > 0
        digests[mode] = optimizer.state_digests()
    assert digests["always"] == digests["never"]


def test_the_scale_does_not_change_the_result_beyond_rounding() -> None:
    models = [model_of() for _ in range(2)]
    for model, scale in zip(models, (None, 2.0**9), strict=True):
        with AdamW(model.parameters(), speculation="always", max_grad_norm=0.5) as optimizer:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
            for seed in range(4):
                optimizer.zero_grad()
                scaler.scale(batch(model, seed)).backward()
                scaler.step(optimizer)
                scaler.update()
            norm = optimizer.grad_norm
            assert norm < 10, "that of the unscaled gradient"
    assert_trained_alike(*models)
