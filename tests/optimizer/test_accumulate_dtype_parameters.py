"""accumulate_dtype="fp32": for which parameters, for how long, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW, CPUAdamW
from superoffload.engine.speculation_schedule import MODES
from superoffload.errors import ArgumentError, StateError, UnknownArgument
from superoffload.optimizer import grad_dtypes
from superoffload.optimizer.fp32_accumulation import check_fp32_sums
from tests.support.adamw_training import batch, model_of
from tests.support.fp32_gradients import (
    as_it_is,
    by_hooks,
    declared,
    needs_grad_dtype,
    of_any_dtype,
    parameters_of,
    steps,
    trained,
    with_main_grad,
)
from tests.support.micro_batches import WINDOWS, Window, loop, losses_of, summed, told


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
        param.grad = None
    batch(model, 1).backward()
    assert [param.grad.dtype for param in params] == [grad.dtype for grad in first]


@needs_grad_dtype
def test_a_second_optimizer_of_the_same_parameters() -> None:
    """As where a cell of a notebook is run again: the first one is closed behind the second one's construction."""
    model = model_of(torch.bfloat16)
    params = parameters_of(model)
    first = AdamW(params, threads=1, accumulate_dtype="fp32")
    batch(model, 0).backward()
    with AdamW(params, threads=1, accumulate_dtype="fp32") as second:
        sums = [param.grad.clone() for param in params]
        first.close()
        assert _dtypes(params) == [torch.float32] * 6
        assert all(torch.equal(param.grad, grad) for param, grad in zip(params, sums, strict=True))
        batch(model, 1).backward()
        second.step()
    assert _dtypes(params) == [torch.bfloat16] * 6


@needs_grad_dtype
@pytest.mark.parametrize("still_open", [True, False])
def test_a_model_that_is_converted_has_gradients_of_its_own_dtype(still_open: bool) -> None:
    model = model_of(torch.bfloat16)
    optimizer = AdamW(model.parameters(), threads=1, accumulate_dtype="fp32")
    if still_open:
        model.float()
    optimizer.close()
    assert _dtypes(parameters_of(model)) == [torch.float32 if still_open else torch.bfloat16] * 6


@needs_grad_dtype
def test_the_error_says_whether_the_gradient_or_its_dtype_was_changed() -> None:
    model = model_of(torch.bfloat16)
    with AdamW(model.parameters(), threads=1, accumulate_dtype="fp32") as optimizer:
        batch(model, 0).backward()
        gradient = parameters_of(model)[0].grad.bfloat16()
        for dtype, why in ((torch.float32, "was replaced or converted"), (torch.bfloat16, "was set to torch.bf")):
            with pytest.raises(StateError, match=why):
                optimizer._lasting.fp32_accumulation.check("weight", SimpleNamespace(grad_dtype=dtype), gradient)


@needs_grad_dtype
def test_memory_that_is_refused_while_a_gradient_changes_its_dtype() -> None:
    """Before, nothing has changed; behind, one gradient is gone, which shows, and everything else is set back."""
    convert = grad_dtypes._in_dtype
    left = [2, 2]  # calls until one is refused, of the optimizer that is made and of that which is closed

    def refused(*args: Any) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("refused")
        return convert(*args)

    model = model_of(torch.bfloat16)
    batch(model, 0).backward()
    values = [param.grad.clone() for param in parameters_of(model)]
    with mock.patch.object(grad_dtypes, "_in_dtype", refused), pytest.raises(torch.OutOfMemoryError):
        AdamW(model.parameters(), threads=1, accumulate_dtype="fp32")
    assert _dtypes(model.parameters()) == [torch.bfloat16] * 6
    assert all(torch.equal(param.grad, one) for param, one in zip(parameters_of(model), values, strict=True))
    optimizer = AdamW(model.parameters(), threads=1, accumulate_dtype="fp32")
    del left[0]
    with mock.patch.object(grad_dtypes, "_in_dtype", refused):
        optimizer.close()
    assert _dtypes(model.parameters()) == [torch.bfloat16] * 6
    kept = [
        torch.equal(param.grad, one)
        for param, one in zip(parameters_of(model), values, strict=True)
        if param.grad is not None
    ]
    assert kept == [True] * 5


@needs_grad_dtype
def test_one_that_could_not_be_made_leaves_nothing_behind() -> None:
    model = model_of(torch.bfloat16)
    with pytest.raises(ArgumentError, match="trace"):
        AdamW(model.parameters(), accumulate_dtype="fp32", trace="/nowhere/at/all.json")
    assert _dtypes(model.parameters()) == [torch.bfloat16] * 6


@needs_grad_dtype
def test_parameters_that_come_later() -> None:
    """A frozen one has its first window in fp32, too, and so has a group that is added."""

    def train(window: Window, model: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": list(model[3].parameters())})
        for number, count in enumerate(WINDOWS):
            optimizer.zero_grad()
            model[0].weight.requires_grad_(number > 1)
            window(optimizer, losses_of(model, number, count))
            optimizer.step()

    def run(window: Window, source: Callable[[nn.Module], None], **options: Any) -> dict[str, str]:
        model: Any = model_of(torch.bfloat16)
        source(model)
        model[0].weight.requires_grad_(False)
        with AdamW(list(model[:3].parameters()), lr=1e-2, threads=2, **options) as optimizer:
            train(window, model, optimizer)
            return optimizer.state_digests()

    expected = run(summed, declared, speculation="never")
    for mode in MODES:
        for window in (loop, told):
            assert run(window, as_it_is, speculation=mode, accumulate_dtype="fp32") == expected


@needs_grad_dtype
def test_main_grad_in_fp32_is_left_as_it_is() -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        for number, count in enumerate(WINDOWS):
            optimizer.zero_grad()
            loop(optimizer, losses_of(model, number, count))
            optimizer.step()

    expected = trained(by_hooks, train, torch.bfloat16).state_digests()
    assert trained(by_hooks, train, torch.bfloat16, accumulate_dtype="fp32").state_digests() == expected
    model = model_of(torch.bfloat16)
    for param in model.parameters():
        with_main_grad(param)
    with AdamW(model.parameters(), threads=1, accumulate_dtype="fp32"):
        assert _dtypes(model.parameters()) == [torch.bfloat16] * 6


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


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["bf16", "float32", torch.bfloat16, torch.float64, True, 32])
def test_what_it_cannot_be(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"accumulate_dtype=.*expected 'fp32', or None"):
        AdamW(model_of(torch.bfloat16).parameters(), accumulate_dtype=value)


def test_main_grad_that_rounds_is_refused() -> None:
    model = model_of(torch.bfloat16)
    last = parameters_of(model)[-1]
    last.main_grad = torch.zeros_like(last)
    with pytest.raises(ArgumentError, match=r"parameter 5 of param_groups\[0\]: p.main_grad is torch.bfloat16"):
        AdamW(model.parameters(), accumulate_dtype="fp32")


@needs_grad_dtype
def test_a_group_that_is_refused_changes_nothing() -> None:
    model, more = model_of(torch.bfloat16), model_of(torch.bfloat16)
    parameters_of(more)[-1].main_grad = torch.zeros_like(parameters_of(more)[-1])
    with AdamW(model.parameters(), threads=1, accumulate_dtype="fp32") as optimizer:
        with pytest.raises(ArgumentError, match="main_grad"):
            optimizer.add_param_group({"params": list(more.parameters())})
        assert len(optimizer.param_groups) == 1 and _dtypes(more.parameters()) == [torch.bfloat16] * 6


def test_a_torch_that_cannot_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.10, where parameters have no grad_dtype."""
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    monkeypatch.setattr("superoffload.optimizer.fp32_accumulation.Tensor", object)
    param = SimpleNamespace(dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"w needs p.grad_dtype, which torch 2.9.1 does not have.*torch 2.10"):
        check_fp32_sums([("w", param)], None)
    param.main_grad = torch.zeros(2)
    check_fp32_sums([("w", param), ("b", SimpleNamespace(dtype=torch.float32))], None)


def test_the_kernel_alone_says_how_to_do_it() -> None:
    with pytest.raises(UnknownArgument, match=r"accumulate_dtype='fp32': .*p.grad_dtype = torch.float32"):
        CPUAdamW(model_of(torch.bfloat16).parameters(), accumulate_dtype="fp32")  # type: ignore[call-arg]  # refused, which is tested
    for name in ("grad_accum_dtype", "grad_dtype"):
        with pytest.raises(UnknownArgument, match="did you mean accumulate_dtype"):
            AdamW(model_of().parameters(), **{name: "fp32"})  # type: ignore[arg-type]  # a wrong name on purpose
