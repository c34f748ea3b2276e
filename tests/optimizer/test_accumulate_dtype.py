"""accumulate_dtype="fp32": micro-batches of bf16 and fp16 parameters add up in fp32, whatever adds them where."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from benchmarks.accumulation import error_of_sum
from superoffload import AdamW
from superoffload.engine.schedule import MODES
from superoffload.errors import ArgumentError, StateError
from superoffload.optimizer import accumulation
from superoffload.optimizer.accumulation import check_fp32_sums
from tests.support.adamw_training import batch, check_counters, model_of
from tests.support.fp32_gradients import (
    as_it_is,
    declared,
    loop,
    losses_of,
    needs_grad_dtype,
    of_any_dtype,
    parameters_of,
    steps,
    told,
    trained,
    with_main_grad,
)

WINDOWS = (3, 1, 5, 2)  # micro-batches of each step
Window = Callable[[AdamW, Iterable[Tensor]], None]


def in_own_dtype(loss: Tensor, params: Sequence[Any], **options: Any) -> list[Tensor]:
    """Gradients as autograd makes them where nothing is said of their dtype."""
    for param in params:
        param.grad, param.grad_dtype = None, param.dtype
    found = list(torch.autograd.grad(loss, params, **options))
    for param, grad in zip(params, found, strict=True):
        assert grad.dtype is param.dtype
        param.grad_dtype = torch.float32
    return found


def summed(optimizer: AdamW, losses: Iterable[Tensor]) -> None:
    """The reference: torch adds such gradients in fp32."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    sums = [torch.zeros_like(param, dtype=torch.float32) for param in params]
    for loss in losses:
        for total, grad in zip(sums, in_own_dtype(loss, params), strict=True):
            total.add_(grad.float())
    for param, total in zip(params, sums, strict=True):
        param.grad = total


def train_windows(window: Window, model: nn.Module, optimizer: Any) -> None:
    """With steps that clip, change the learning rate, or are skipped."""
    for number, count in enumerate((*WINDOWS, *WINDOWS)):
        optimizer.zero_grad()
        optimizer.max_grad_norm = 0.05 if number == 3 else 100.0
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
        window(optimizer, losses_of(model, number, count))
        if number == 5:
            gradient = model.get_parameter("0.bias").grad
            assert gradient is not None
            gradient[0] = torch.inf
        optimizer.step()


@needs_grad_dtype
@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, loop), (torch.float16, told)])
def test_the_bits_of_sums_that_torch_makes_in_fp32(dtype: torch.dtype, window: Window) -> None:
    expected = trained(declared, partial(train_windows, summed), dtype, speculation="never").state_digests()
    for mode in MODES:
        found = trained(as_it_is, partial(train_windows, window), dtype, speculation=mode, accumulate_dtype="fp32")
        check_counters(found)
        assert found.state_digests() == expected, mode
        assert found.stats()["skipped_steps"] == 1 and found.stats()["clipped_steps"] == 1
        assert bool(found.stats()["buckets_speculated"]) or mode != "always"
    rounded = trained(as_it_is, partial(train_windows, window), dtype).state_digests()
    assert rounded["master"] != expected["master"], "these sums are none that the parameters' dtype could hold"


@needs_grad_dtype
def test_sums_in_bf16_lose_digits_and_the_more_the_more_micro_batches_they_have() -> None:
    few, many = error_of_sum(4, None), error_of_sum(64, None)
    assert 2 * few < many < 0.1
    assert error_of_sum(4, "fp32") < 1e-5 * few and error_of_sum(64, "fp32") < 1e-5 * many


def _dtypes(params: Any) -> list[Any]:
    return [param.grad_dtype for param in params]


@needs_grad_dtype
def test_what_is_set_is_set_back() -> None:
    """A gradient that is there is widened first, and rounded in the end: it stays the one of its parameter."""
    model = model_of(torch.bfloat16)
    params = parameters_of(model)
    params[1].grad_dtype = None
    declared(nn.ParameterList([params[2]]))
    before = _dtypes(params)
    batch(model, 0).backward()
    first = [param.grad.clone() for param in params]
    with AdamW(params, threads=1, accumulate_dtype="fp32"):
        assert _dtypes(params) == [torch.float32] * 6
        assert all(torch.equal(p.grad, grad.float()) for p, grad in zip(params, first, strict=True))
        batch(model, 1).backward()
        both = [param.grad.clone() for param in params]
    assert _dtypes(params) == before
    for index, (param, grad) in enumerate(zip(params, both, strict=True)):
        assert torch.equal(param.grad, grad if index == 2 else grad.bfloat16())
    converted = model_of(torch.bfloat16)
    with_main_grad(parameters_of(converted)[0])
    with AdamW(converted.parameters(), threads=1, accumulate_dtype="fp32"):
        assert _dtypes(converted.parameters()) == [torch.bfloat16] + [torch.float32] * 5
        converted.float()
    assert _dtypes(converted.parameters()) == [torch.float32] * 6


@needs_grad_dtype
def test_a_model_and_its_optimizer_may_end_together_as_garbage() -> None:
    """Weak references to the parameters are gone when the optimizer closes itself; pytest fails what __del__ raises."""
    model: Any = nn.Linear(3, 3).bfloat16()
    model.optimizer = AdamW(model.parameters(), accumulate_dtype="fp32")
    model.optimizer.trained = model
    ended = weakref.ref(model)
    del model
    gc.collect()
    assert ended() is None


@needs_grad_dtype
def test_a_dtype_that_is_changed_meanwhile_is_an_error_and_not_a_rounded_sum() -> None:
    model = model_of(torch.bfloat16)
    with AdamW(model.parameters(), threads=2, accumulate_dtype="fp32") as optimizer:
        steps(model, optimizer, range(2))
        before = optimizer.state_digests()
        optimizer.zero_grad()
        of_any_dtype(model)
        with pytest.raises(StateError, match=r"gradient is torch.bfloat16, so it was not added up in fp32"):
            batch(model, 3).backward()
        optimizer.zero_grad()
        assert optimizer.state_digests() == before
        declared(model)
        steps(model, optimizer, range(2))
        assert optimizer.stats()["steps"] == 4


@needs_grad_dtype
def test_what_is_refused_changes_nothing() -> None:
    model, more = model_of(torch.bfloat16), model_of(torch.bfloat16)
    wrong: list[Any] = ["bf16", torch.float64, True]
    for value in wrong:
        with pytest.raises(ArgumentError, match=r"accumulate_dtype=.*expected 'fp32', or None"):
            AdamW(model.parameters(), accumulate_dtype=value)
    with pytest.raises(ArgumentError, match="trace"):
        AdamW(model.parameters(), accumulate_dtype="fp32", trace="/nowhere/at/all.json")
    assert _dtypes(model.parameters()) == [torch.bfloat16] * 6
    last = parameters_of(more)[-1]
    last.main_grad = torch.zeros_like(last)
    with AdamW(model.parameters(), threads=1, accumulate_dtype="fp32") as optimizer:
        with pytest.raises(ArgumentError, match=r"p.main_grad is torch.bfloat16"):
            optimizer.add_param_group({"params": list(more.parameters())})
        assert len(optimizer.param_groups) == 1 and _dtypes(more.parameters()) == [torch.bfloat16] * 6


def test_a_torch_that_cannot_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.10, where parameters have no grad_dtype."""
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    monkeypatch.setattr("superoffload.optimizer.accumulation.Tensor", object)
    param = SimpleNamespace(dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"w needs p.grad_dtype, which torch 2.9.1 does not have.*torch 2.10"):
        check_fp32_sums([("w", param)], None)
    param.main_grad = torch.zeros(2)
    check_fp32_sums([("w", param), ("b", SimpleNamespace(dtype=torch.float32))], None)


@needs_grad_dtype
def test_memory_that_is_refused_while_a_gradient_changes_its_dtype() -> None:
    """Before, nothing has changed; behind, one gradient is gone, which shows, and everything else is set back."""
    convert = accumulation._in_dtype
    left = [2]  # calls until one is refused

    def refused(*args: Any) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("refused")
        return convert(*args)

    model = model_of(torch.bfloat16)
    params = parameters_of(model)
    batch(model, 0).backward()
    values = [param.grad.clone() for param in params]
    with mock.patch.object(accumulation, "_in_dtype", refused), pytest.raises(torch.OutOfMemoryError):
        AdamW(params, threads=1, accumulate_dtype="fp32")
    assert _dtypes(params) == [torch.bfloat16] * 6
    assert all(torch.equal(param.grad, value) for param, value in zip(params, values, strict=True))
    optimizer = AdamW(params, threads=1, accumulate_dtype="fp32")
    left[0] = 2
    with mock.patch.object(accumulation, "_in_dtype", refused):
        optimizer.close()
    assert _dtypes(params) == [torch.bfloat16] * 6
    kept = [(param.grad, value) for param, value in zip(params, values, strict=True) if param.grad is not None]
    assert len(kept) == 5 and all(torch.equal(grad, value) for grad, value in kept)
