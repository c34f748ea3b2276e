"""fp32 gradients of bf16 and fp16 parameters, in p.grad or p.main_grad, are taken as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW, CPUAdamW
from superoffload.engine.schedule import MODES
from superoffload.errors import ArgumentError, HostMemoryError, StateError
from superoffload.optimizer.gradient_source import dtype_to_come
from tests.support.adamw_training import check_counters, model_of
from tests.support.fp32_gradients import (
    SOURCES,
    as_it_is,
    by_kernels,
    declared,
    gradient_of,
    needs_grad_dtype,
    parameters_of,
    precise_loss,
    steps,
    trained,
)

pytestmark = needs_grad_dtype


def _all_at_once(model: nn.Module, optimizer: Any) -> None:
    """Clips, adds up two backwards and edits some gradients."""
    for seed, norm in enumerate((0.01, None, 0.5, 100.0)):
        optimizer.max_grad_norm = norm
        optimizer.zero_grad()
        for micro in range(1 + seed % 2):
            precise_loss(model, 2 * seed + micro).backward()
        for param in list(model.parameters())[2 * seed :]:
            with torch.no_grad():
                gradient_of(param).mul_(0.75)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_way_gives_the_same_bits(dtype: torch.dtype) -> None:
    expected = trained(declared, _all_at_once, dtype, speculation="never").state_digests()
    for number, (name, source) in enumerate(SOURCES.items()):
        for mode in {"always", MODES[number % len(MODES)]}:
            optimizer = trained(source, _all_at_once, dtype, speculation=mode)
            check_counters(optimizer)
            assert optimizer.state_digests() == expected, (name, mode)
            assert bool(optimizer.stats()["buckets_speculated"]) == (mode == "always") or mode == "adaptive"
    rounded = trained(as_it_is, _all_at_once, dtype).state_digests()
    assert rounded["master"] != expected["master"], "these gradients are none that the parameters' dtype could hold"


def _after_arrivals(count: int, model: nn.Module, change: Callable[[], None]) -> None:
    """In the first backward, behind so many gradients."""
    left = [change] + [lambda: None] * (count - 1)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: left.pop()() if left else None)


@pytest.mark.parametrize("when", ["in a step", "after steps"])
def test_a_wider_gradient_that_comes_too_late(when: str) -> None:
    """Others are packed, or buckets have their sizes: an error that says what to do; the step can be given up."""
    model = model_of(torch.bfloat16)
    first = next(model.parameters())
    with AdamW(model.parameters(), threads=2, bucket_numel=64) as optimizer:
        if when == "in a step":
            _after_arrivals(5, model, lambda: declared(nn.ParameterList([first])))
            words = r"params'\]\[0\]: its gradient is torch.float32.*bfloat16 was expected.*packed; set p.grad_dtype"
        else:
            steps(model, optimizer, range(2))
            optimizer.zero_grad()
            declared(model)
            words = r"float32, and torch.bfloat16 was expected, as in the steps before"
        before = optimizer.state_digests()
        with pytest.raises(ArgumentError, match=words):
            precise_loss(model, 0).backward()
        optimizer.zero_grad()
        assert optimizer.state_digests() == before
        if when == "in a step":
            steps(model, optimizer, range(2))
            assert optimizer.stats()["steps"] == 2


def test_the_kernel_alone_takes_them_too() -> None:
    expected = trained(declared, steps, torch.bfloat16)
    model = model_of(torch.bfloat16)
    declared(model)
    steps(model, CPUAdamW(model.parameters(), lr=1e-2))
    for param, state in zip(model.parameters(), expected.state.values(), strict=True):
        assert torch.equal(param, state["master"].bfloat16())


def test_zero_grad_zeroes_main_grad_in_place_and_then_a_step_has_gradients_of_zero() -> None:
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
        ours.zero_grad()
        assert not any(grad.any() for grad in grads)
        assert not any(param.grad_added_to_main_grad for param in parameters_of(model))
        assert [gradient_of(param).data_ptr() for param in model.parameters()] == before, "kernels know its memory"
        ours.step()
        for param in parameters_of(twin):
            del param.main_grad
            param.grad = torch.zeros_like(param)
        other.step()
        assert ours.stats()["steps"] == 3 and ours.state_digests() == other.state_digests()


def test_what_is_added_behind_backward_counts() -> None:
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

    found = trained(by_kernels, late, torch.bfloat16, speculation="always")
    assert found.state_digests() == trained(by_kernels, at_once, torch.bfloat16).state_digests()
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


def test_a_dtype_or_main_grad_that_does_not_fit_the_parameter_is_refused() -> None:
    for own, declared_as in ((torch.bfloat16, torch.float64), (torch.float32, torch.bfloat16)):
        model = model_of(own)
        next(model.parameters()).grad_dtype = declared_as
        with pytest.raises(ArgumentError, match=rf"grad_dtype is {declared_as}, expected .*float32"):
            AdamW(model.parameters())
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
    param: Any = SimpleNamespace(grad_dtype=torch.float32, dtype=torch.bfloat16, requires_grad=True)
    older = SimpleNamespace(Tensor=object, float32=torch.float32, __version__="2.9.1")
    monkeypatch.setattr("superoffload.optimizer.gradient_source.torch", older)
    with pytest.raises(ArgumentError, match=r"p\.grad_dtype is set, which this torch \(2\.9\.1\) does not know"):
        dtype_to_come("weight", param)


def _first_three_declared(model: nn.Module) -> None:
    declared(nn.ParameterList(list(model.parameters())[:3]))


def test_memory_that_is_refused_with_gradients_in_hand() -> None:
    """Those that had arrived are brought again by the step that their user makes of them."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        precise_loss(model, 0).backward()
        found = [param.grad for param in model.parameters() if param.grad is not None]
        model.zero_grad()
        return found

    wide = model_of(torch.bfloat16)
    _first_three_declared(wide)
    values = gradients(wide)
    digests = []
    for refuses in (False, True):
        model = model_of(torch.bfloat16)
        _after_arrivals(2, model, partial(_first_three_declared, model))
        with AdamW(model.parameters(), lr=1e-2, threads=2, bucket_numel=1 << 20) as optimizer:
            refused = mock.patch.object(optimizer._engine.link, "attach", side_effect=HostMemoryError("refused"))
            if refuses:
                with refused, pytest.raises(HostMemoryError, match="refused"):
                    precise_loss(model, 0).backward()
            _first_three_declared(model)
            for param, value in list(zip(model.parameters(), values, strict=True))[: 4 if refuses else None]:
                param.grad = value.clone()
            optimizer.step()
            assert [shard.steps for shard in optimizer._engine.shards] == [1] * 6
            digests.append(optimizer.state_digests())
    assert digests[0] == digests[1]
