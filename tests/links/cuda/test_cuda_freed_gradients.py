"""Gradients are freed once they are packed: what stands for them, for how long, and memory of what is brought back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.support.fake_cuda_training import check_against_host, quick_collections, training
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


def test_one_of_a_step_before_is_gone_once_a_part_of_the_next_is_packed(fake: Fake) -> None:
    """A large gradient's first buckets are packed while its last one waits for others."""
    with on_fake_device(fake):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 80), nn.Linear(80, 4)).to(torch.bfloat16)
        model.register_forward_pre_hook(lambda *_: fake.synchronize())
        weight: Any = model[2].weight
        kept: list[Any] = []
        errors: list[str] = []

        def look(_: Tensor) -> None:
            if kept:
                with pytest.raises(StateError, match="made way for a later one") as caught:
                    kept[0].norm()
                errors.append(str(caught.value))

        with AdamW(model.parameters(), threads=1, bucket_numel=1024) as optimizer:
            train(model, optimizer, range(2))
            hook = weight.register_post_accumulate_grad_hook(look)
            kept.append(weight.grad)
            optimizer.zero_grad()
            batch(model, 2).backward()
            hook.remove()
        assert len(errors) == 1


def test_a_gradient_that_was_lost_on_its_way_is_an_error(fake: Fake) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        grad = next(model.parameters()).grad
        assert isinstance(grad, PackedGradient)
        lost = mock.Mock()
        lost.wait.side_effect = RuntimeError("the copy has failed")
        for bucket in optimizer._engine.buckets:
            bucket.packed = lost
        with pytest.raises(DeviceError, match="the copy has failed"):
            grad.norm()
        optimizer.step()


def test_kept_gradients_may_be_edited(fake: Fake) -> None:
    def edited(model: nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        batch(model, 2).backward()
        fake.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    check_against_host(fake, edited, keep_grads=True)


@pytest.mark.parametrize("value", [0, "no", 1.5])
def test_keep_grads_is_checked(value: Any) -> None:
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


def _zeros_for_the_step(model: nn.Module, optimizer: AdamW) -> None:
    optimizer.zero_grad(set_to_none=False)
    with refused("torch.empty_strided"):
        optimizer.step()


def _reading(model: nn.Module, optimizer: AdamW) -> None:
    with refused("torch.empty"):
        brought_back(next(model.parameters()))


def _sums_of_what_was_read(model: nn.Module, optimizer: AdamW) -> None:
    with refused("superoffload.links.cuda.bit_sums.CudaBitSums.of"):
        brought_back(next(model.parameters()))


def _a_second_backward(model: nn.Module, optimizer: AdamW) -> None:
    with refused("superoffload.links.cuda.bit_sums.CudaBitSums.of"):
        batch(model, 9).backward()


@contextmanager
def refused(name: str) -> Iterator[None]:
    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory, as a test has asked for")

    with mock.patch(name, out_of_memory):
        yield


@pytest.mark.parametrize("use", [_zeros_for_the_step, _reading, _sums_of_what_was_read, _a_second_backward])
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
        goes_on(fake, model, optimizer, before)


@needs_grad_dtype
def test_no_room_to_widen_a_gradient(fake: Fake) -> None:
    model = model_of(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = None  # whatever comes, in buckets of fp32
    with training(fake, model=model) as (_, optimizer):
        before = optimizer.state_digests()
        optimizer.zero_grad()
        loss = batch(model, 2)
        with refused("torch.Tensor.to"), pytest.raises(DeviceError, match="no room on the device"):
            loss.backward()
        goes_on(fake, model, optimizer, before)


def goes_on(fake: Fake, model: nn.Module, optimizer: AdamW, before: dict[str, str]) -> None:
    fake.synchronize()
    optimizer.zero_grad()
    assert optimizer.state_digests() == before
    batch(model, 3).backward()
    optimizer.step()
    fake.synchronize()
    assert optimizer.state_digests() != before
