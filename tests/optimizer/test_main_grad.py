"""Parameters with a main_grad, as Megatron and Transformer Engine use it: that is what they are stepped with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, CPUAdamW
from superoffload.errors import ArgumentError, StateError
from superoffload.optimizer.gradient_source import dtype_to_come
from tests.support.adamw_training import batch, model_of
from tests.support.fp32_gradients import (
    add_to_main_grad,
    by_hooks,
    by_kernels,
    gradient_of,
    needs_grad_dtype,
    parameters_of,
    precise_loss,
    steps,
    trained,
    with_main_grad,
)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_zeroes_it_in_place_and_then_a_step_has_gradients_of_zero(set_to_none: bool) -> None:
    """As in Megatron: what has a main_grad always has a gradient. torch does the same with p.grad of zeros."""
    model, twin = model_of(torch.bfloat16), model_of(torch.bfloat16)
    by_kernels(model)
    by_kernels(twin)
    with AdamW(model.parameters(), lr=0.1, threads=2) as ours, AdamW(twin.parameters(), lr=0.1, threads=2) as other:
        steps(model, ours, range(2))
        steps(twin, other, range(2))
        grads = [gradient_of(param) for param in model.parameters()]
        before = [grad.data_ptr() for grad in grads]
        assert all(grad.any() for grad in grads) and all(p.grad_added_to_main_grad for p in parameters_of(model))
        ours.zero_grad(set_to_none)
        assert not any(grad.any() for grad in grads)
        assert not any(param.grad_added_to_main_grad for param in parameters_of(model))
        assert [gradient_of(param).data_ptr() for param in model.parameters()] == before, "kernels know its memory"
        ours.step()
        for param in parameters_of(twin):
            del param.main_grad
            param.grad = torch.zeros_like(param)
        other.step()
        assert ours.stats()["steps"] == 3 and ours.state_digests() == other.state_digests()


@pytest.mark.parametrize("mode", ["always", "adaptive"])
def test_what_is_added_behind_backward_counts(mode: str) -> None:
    """Kernels that are put off until backward has ended tell neither autograd nor versions of it."""

    def late(model: nn.Module, optimizer: Any) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            precise_loss(model, seed).backward()
            for param in list(model.parameters())[seed:]:
                gradient_of(param).data.mul_(0.5)
            optimizer.step()

    def at_once(model: nn.Module, optimizer: Any) -> None:
        optimizer.accumulate().__enter__()  # nothing is packed during backward
        late(model, optimizer)

    found = trained(by_kernels, late, torch.bfloat16, speculation=mode)
    assert found.state_digests() == trained(by_kernels, at_once, torch.bfloat16).state_digests()
    if mode == "always":
        assert found.stats()["buckets_speculated"] > 0


@needs_grad_dtype
def test_a_hook_behind_ours_is_right_and_not_speculated() -> None:
    """Ours sees that something is still to be added."""

    def without_hooks(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad_dtype = torch.float32
            with_main_grad(param)

    def code(model: nn.Module, optimizer: Any) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(add_to_main_grad)
        steps(model, optimizer)

    behind = trained(without_hooks, code, torch.bfloat16, speculation="always")
    before = trained(by_hooks, steps, torch.bfloat16, speculation="always")
    assert behind.state_digests() == before.state_digests()
    assert behind.stats()["buckets_speculated"] == 0 < before.stats()["buckets_speculated"]


@needs_grad_dtype
def test_it_is_made_when_the_first_gradient_comes() -> None:
    """What one parameter turns out to have is expected of the others of its group."""

    def make_and_add(param: Tensor) -> None:
        if not hasattr(param, "main_grad"):
            with_main_grad(param)
        add_to_main_grad(param)

    def lazily(model: nn.Module) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(make_and_add)

    def narrow(model: nn.Module) -> None:
        by_hooks(model)
        for param in model.parameters():
            param.grad_dtype = torch.bfloat16

    options = {"speculation": "always", "bucket_numel": 64}
    found = trained(lazily, steps, torch.bfloat16, **options)
    assert found.state_digests() == trained(narrow, steps, torch.bfloat16, **options).state_digests()
    assert found.stats()["buckets_speculated"] > 0


def test_two_gradients_of_one_parameter_are_an_error_unless_one_is_a_stand_in() -> None:
    """zero_out_wgrad: a weight that is shared; what autograd returns is the gradient of its other uses."""
    model = model_of(torch.bfloat16)
    by_kernels(model)
    first: Any = next(model.parameters())
    first.zero_out_wgrad = True
    with AdamW(model.parameters(), threads=2) as optimizer:
        before = optimizer.state_digests()
        precise_loss(model, 0).backward()
        stand_in, *others = (param.grad for param in model.parameters())
        assert stand_in is not None and others == [None] * len(others)
        with pytest.raises(StateError, match=r"params'\]\[0\]: it has both p.grad and p.main_grad.*p.grad = None"):
            optimizer.step()
        assert optimizer.state_digests() == before
        first.grad = None
        optimizer.step()
        assert optimizer.stats()["steps"] == 1
        assert all(param.isfinite().all() for param in model.parameters())


def test_a_main_grad_that_is_taken_away_or_comes_between() -> None:
    def code(model: nn.Module, optimizer: Any) -> None:
        steps(model, optimizer, range(1))
        optimizer.zero_grad()
        precise_loss(model, 1).backward()
        first, second, *_ = parameters_of(model)
        first.main_grad = None
        second.main_grad = second.main_grad.clone() * 2
        optimizer.step()

    optimizer = trained(by_kernels, code, torch.bfloat16, speculation="always")
    assert [shard.steps for shard in optimizer._engine.shards] == [1, 2, 2, 2, 2, 2]
    assert optimizer.state_digests() == trained(by_kernels, code, torch.bfloat16, speculation="never").state_digests()


def test_frozen_parameters_are_left_alone_and_can_be_unfrozen() -> None:
    model = model_of(torch.bfloat16)
    by_kernels(model)
    first = next(model.parameters())
    first.requires_grad_(False)
    with AdamW(model.parameters(), threads=2) as optimizer:
        value = first.detach().clone()
        steps(model, optimizer, range(2))
        assert torch.equal(first, value) and first not in optimizer.state
        first.requires_grad_(True)
        steps(model, optimizer, range(2, 4))
        assert not torch.equal(first, value) and optimizer.state[first]["step"] == 2
        first.requires_grad_(False)
        value.copy_(first)
        steps(model, optimizer, range(4, 6))
        assert torch.equal(first, value) and optimizer.state[first]["step"] == 2


def test_in_the_dtype_of_the_parameter() -> None:
    """As Megatron's grad_reduce_in_fp32=False has it: the bits of p.grad."""

    def narrow(model: nn.Module) -> None:
        for param in parameters_of(model):
            param.main_grad = torch.zeros_like(param)
            param.register_post_accumulate_grad_hook(add_to_main_grad)

    def code(model: nn.Module, optimizer: Any) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            batch(model, seed).backward()
            optimizer.step()

    found, plain = trained(narrow, code, torch.bfloat16), trained(lambda _: None, code, torch.bfloat16)
    assert found.state_digests() == plain.state_digests()
    assert found.stats()["bytes_down"] == plain.stats()["bytes_down"]


def test_what_does_not_fit_the_parameter_is_refused() -> None:
    model = model_of(torch.bfloat16)
    first: Any = next(model.parameters())
    first.main_grad = torch.zeros(first.shape, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"p.main_grad is torch.float64, expected .* torch.bfloat16, or float32"):
        AdamW(model.parameters())
    first.main_grad = torch.zeros(3)
    found = r"gradient of torch.float32 \(3,\) on cpu, expected torch.bfloat16 or"
    with AdamW(model.parameters(), threads=2) as optimizer, pytest.raises(ArgumentError, match=found):
        optimizer.step()
    kernel = CPUAdamW([first])
    with pytest.raises(StateError, match=r"p\.main_grad, and CPUAdamW reads p\.grad only; use superoffload\.AdamW"):
        kernel.step()
    kernel.close()


def test_a_dtype_of_gradients_that_this_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.10 ``p.grad_dtype`` is an attribute like any other, which autograd does not read."""
    param = SimpleNamespace(grad_dtype=torch.float32, dtype=torch.bfloat16, requires_grad=True)
    older = SimpleNamespace(Tensor=object, float32=torch.float32, __version__="2.9.1")
    monkeypatch.setattr("superoffload.optimizer.gradient_source.torch", older)
    with pytest.raises(ArgumentError, match=r"p\.grad_dtype is set, which this torch \(2\.9\.1\) does not know"):
        dtype_to_come("weight", param)  # type: ignore[arg-type]  # a parameter of that torch
