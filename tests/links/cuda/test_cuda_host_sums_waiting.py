"""Gradients that add up in host memory: what becomes of one that waits to be added to what was packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.errors import DeviceError, StateError
from superoffload.optimizer.packed_gradient import PackedGradient
from tests.support.adamw_training import batch, grads_of, model_of
from tests.support.fake_cuda import Fake, on_fake_device
from tests.support.fp32_gradients import needs_grad_dtype
from tests.support.freed_gradients import OPTIONS, on_the_device, on_the_host, seen
from tests.support.host_sums import BF16, FP32, bytes_in_use, free_bytes, uneven
from tests.support.link_runs import LATE

pytestmark = needs_grad_dtype


def _read(param: Any) -> Any:
    return seen(param.grad)


def _multiply(param: Any) -> None:
    param.grad.mul_(0.5)


def _set_to_zero(param: Any) -> None:
    param.grad.zero_()


def _replace(param: Any) -> None:
    param.grad = param.grad + 1


@pytest.mark.parametrize("hook", [_read, _multiply, _set_to_zero, _replace])
def test_hooks_before_ours_find_the_sum(fake: Fake, hook: Callable[[Any], Any]) -> None:
    found: list[Any] = []

    def hooked(dtype: torch.dtype) -> nn.Module:
        found.clear()
        model = model_of(dtype)
        for param in model.parameters():  # before the optimizer has its own
            param.register_post_accumulate_grad_hook(lambda param: found.append(hook(param)))
        return model

    expected = on_the_host(uneven, BF16, hooked, **FP32), list(found)
    fake.delays(2, LATE)
    with free_bytes(0):
        assert (on_the_device(fake, uneven, BF16, hooked, **FP32)[0], found) == expected


@pytest.mark.parametrize("then", ["step", "another pass", "read", "zeroed"])
def test_what_is_added_by_others_counts_as_well(fake: Fake, then: str) -> None:
    """In C++, as autograd does it, but without a hook behind it."""

    def added(model: nn.Module, optimizer: AdamW) -> list[Any]:
        batch(model, 0).backward()
        param = next(model.parameters())
        assert param.grad is not None
        for value in (1.0, 0.1):
            torch.ops.aten.add_.Tensor(param.grad, torch.full_like(param, value, dtype=torch.float32))
            if value == 1.0 and isinstance(param.grad, PackedGradient):
                assert param.grad.in_memory is None, "it waits"
            if then != "another pass":
                break
        if then == "read":
            return [param.grad.norm()]
        if then == "another pass":
            batch(model, 1).backward()
        if then == "zeroed":
            param.grad.zero_()
        optimizer.step()
        return [optimizer.grad_norm]

    expected = on_the_host(added, BF16, **FP32)
    with free_bytes(0):
        assert on_the_device(fake, added, BF16, **FP32)[0] == expected


def test_an_error_leaves_what_was_to_be_added_in_the_gradient(fake: Fake) -> None:
    """``step()`` refuses, since other gradients are missing; what is there is right."""
    model = model_of(BF16)
    with free_bytes(0), on_fake_device(fake) as links, AdamW(model.parameters(), **{**OPTIONS, **FP32}) as optimizer:
        before = optimizer.state_digests()
        batch(model, 0).backward()
        first = [grad.clone() for grad in grads_of(model)]
        optimizer.zero_grad()
        batch(model, 0).backward()
        links[0].fake_device.capturing = True
        with pytest.raises(DeviceError, match="CUDA graph"):
            batch(model, 0).backward()
        links[0].fake_device.capturing = False
        with pytest.raises(StateError, match="was ended at"):
            optimizer.step()
        waiting = [number for number, grad in enumerate(grads_of(model)) if bytes_in_use(grad)]
        assert len(waiting) == 1, "the one whose hook has failed"
        grad = grads_of(model)[waiting[0]]
        assert torch.equal(grad.clone(), first[waiting[0]] + first[waiting[0]])
        optimizer.zero_grad()
        assert optimizer.state_digests() == before
