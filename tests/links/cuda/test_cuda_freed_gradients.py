"""Gradients are freed once they are packed: what stands for them, for how long, and memory of what is brought back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import ArgumentError, DeviceError, StateError
from superoffload.optimizer.packed_gradient import PackedGradient, packed_in
from tests.support.adamw_training import batch, grads_of, model_of, train
from tests.support.fake_cuda import Fake, on_fake_device
from tests.support.fake_cuda_training import quick_collections, training
from tests.support.fp32_gradients import needs_grad_dtype

pytestmark = pytest.mark.filterwarnings("ignore:superoffload. .* needed again")


@pytest.mark.parametrize("way", ["another gradient", "no optimizer", "closed"])
def test_one_that_is_kept_for_longer_is_an_error_and_never_another_gradient(fake: Fake, way: str) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        looked_at = kept.pop()
        assert isinstance(looked_at, PackedGradient)
        values = looked_at.clone()
        optimizer.step()
        if way == "another gradient":
            optimizer.zero_grad()
            batch(model, 3).backward()
        elif way == "closed":
            optimizer.close()
        else:
            optimizer._parts.params.forget_all()
        for grad in kept:
            assert isinstance(grad, PackedGradient)
            with pytest.raises(StateError, match=r"packed and freed.*later one.*clone\(\).*keep_grads=True"):
                grad.norm()
        assert torch.equal(looked_at, values)


def test_keep_grads_is_checked() -> None:
    values: tuple[Any, ...] = (0, "no", 1.5)
    for value in values:
        with pytest.raises(ArgumentError, match="keep_grads"):
            AdamW(model_of().parameters(), keep_grads=value)


@needs_grad_dtype
def test_a_placeholder_is_of_the_dtype_that_its_gradient_may_have(fake: Fake) -> None:
    """In fp32 while the optimizer is open; then as ``p.grad`` may be, without memory, and no gradient any more."""
    model = model_of(torch.bfloat16)
    with on_fake_device(fake), AdamW(model.parameters(), threads=1, accumulate_dtype="fp32") as optimizer:
        batch(model, 0).backward()
        for param in model.parameters():
            assert isinstance(param.grad, PackedGradient) and param.grad.dtype is torch.float32
        optimizer.step()
        fake.synchronize()
        grads_of(model)[0].zero_()
    first, *others = model.parameters()
    for param in model.parameters():
        assert param.grad is not None and param.grad.dtype is torch.bfloat16
        packed: Any = packed_in(param.grad)
        assert packed.in_memory is None and packed.shape == param.shape
    for param in others:
        assert param.grad is not None
        with pytest.raises(StateError, match="its optimizer is closed"):
            param.grad.norm()
    assert first.grad is not None and not first.grad.any(), "it was set to zero, which needs no optimizer"


# ---- memory that they take, and memory that is refused --------------------------------------------------------------


def test_what_was_only_read_goes_with_zero_grad(fake: Fake) -> None:
    """Before the next forward, whose activations need the room."""
    with quick_collections(), training(fake) as (model, optimizer):
        for set_to_none in (True, False):
            optimizer.zero_grad(set_to_none)
            batch(model, 2).backward()
            read = [weakref.ref(brought_back(parameter)) for parameter in model.parameters()]
            optimizer.step()
            assert any(one() is not None for one in read)
            optimizer.zero_grad()
            gc.collect()
            assert not any(one() is not None for one in read)


def brought_back(parameter: Tensor) -> Tensor:
    packed = packed_in(parameter.grad)
    assert packed is not None
    return packed.bring_back()


def _reading(model: nn.Module, optimizer: AdamW) -> None:
    with refused("torch.empty"):
        brought_back(next(model.parameters()))


def _a_second_backward(model: nn.Module, optimizer: AdamW) -> None:
    with refused("superoffload.links.cuda.bit_sums.CudaBitSums.of"):
        batch(model, 9).backward()


def refused(name: str) -> Any:
    return mock.patch(name, side_effect=torch.OutOfMemoryError("CUDA out of memory, as a test has asked for"))


@pytest.mark.parametrize("use", [_reading, _a_second_backward])
def test_no_room_to_bring_gradients_back(fake: Fake, use: Callable[[nn.Module, AdamW], None]) -> None:
    """It is an error that says so, and training goes on behind it with the bits of a run without it."""
    with training(fake) as (model, optimizer):
        before = optimizer.state_digests()
        optimizer.zero_grad()
        batch(model, 2).backward()
        with pytest.raises(DeviceError, match="no room on the device"):
            use(model, optimizer)
        shown = [packed_in(parameter.grad) for parameter in model.parameters()]
        assert not any(packed is not None and packed.in_memory is not None for packed in shown), "half brought back"
        fake.synchronize()
        optimizer.zero_grad()
        assert optimizer.state_digests() == before
        train(model, optimizer, [3])
        fake.synchronize()
        assert optimizer.state_digests() != before
