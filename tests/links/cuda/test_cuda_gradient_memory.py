"""Memory of gradients that were freed and brought back: when it goes again, and what happens where there is none."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import DeviceError
from superoffload.optimizer.packed_gradient import packed_in
from tests.support.adamw_training import batch, model_of
from tests.support.fake_cuda import Fake
from tests.support.fake_cuda_training import training
from tests.support.fp32_gradients import needs_grad_dtype


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_was_only_read_goes_with_zero_grad(fake: Fake, set_to_none: bool) -> None:
    """Before the next forward, whose activations need the room."""
    with training(fake) as (model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that gradients were needed again
        for seed in range(2, 5):
            optimizer.zero_grad(set_to_none)
            batch(model, seed).backward()
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
    with training(fake) as (model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
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
