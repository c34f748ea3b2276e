"""Gradients are freed once they are packed: what stands for them, for how long, what memory they take; those that are
read, clipped or edited then have the bits of the host."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import ArgumentError, DeviceError, StateError
from superoffload.optimizer.placeholder import GradientPlaceholder, packed_in
from tests.support.adamw_training import batch, grads_of, model_of, train
from tests.support.fake_cuda import Fake
from tests.support.fake_cuda_training import LATE, NEEDED_AGAIN, run, seen, taken_back, training, wide_model

pytestmark = pytest.mark.filterwarnings("ignore:superoffload. .* needed again")


@pytest.mark.parametrize("way", ["another gradient", "no optimizer", "closed"])
def test_one_that_is_kept_for_longer_is_an_error_and_never_another_gradient(fake: Fake, way: str) -> None:
    with training(fake) as (model, optimizer):
        optimizer.zero_grad()
        batch(model, 2).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        looked_at = kept.pop()
        assert isinstance(looked_at, GradientPlaceholder)
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
            assert isinstance(grad, GradientPlaceholder)
            with pytest.raises(StateError, match=r"packed and freed.*later one.*clone\(\).*keep_grads=True"):
                grad.norm()
        assert torch.equal(looked_at, values)


def test_keep_grads_is_checked() -> None:
    values: tuple[Any, ...] = (0, "no", 1.5)
    for value in values:
        with pytest.raises(ArgumentError, match="keep_grads"):
            AdamW(model_of().parameters(), keep_grads=value)


# ---- memory that they take, and memory that is refused --------------------------------------------------------------


def brought_back(parameter: Tensor) -> Tensor:
    packed = packed_in(parameter.grad)
    assert packed is not None
    return packed.bring_back()


def test_no_room_to_bring_gradients_back(fake: Fake) -> None:
    """It is an error that says so, and training goes on behind it with the bits of a run without it."""
    with training(fake) as (model, optimizer):
        before = optimizer.state_digests()
        optimizer.zero_grad()
        batch(model, 2).backward()
        refused = mock.patch("torch.empty", side_effect=torch.OutOfMemoryError("CUDA out of memory, as a test asks"))
        with refused, pytest.raises(DeviceError, match="no room on the device"):
            brought_back(next(model.parameters()))
        shown = [packed_in(parameter.grad) for parameter in model.parameters()]
        assert not any(packed is not None and packed.in_memory is not None for packed in shown), "half brought back"
        fake.synchronize()
        optimizer.zero_grad()
        assert optimizer.state_digests() == before
        train(model, optimizer, [3])
        fake.synchronize()
        assert optimizer.state_digests() != before


def steps(model: nn.Module, optimizer: AdamW, between: Callable[[], Any] = lambda: None) -> list[Any]:
    """``between``: after backward and before ``step()``."""
    results = []
    for seed in range(3):
        optimizer.zero_grad()
        batch(model, seed).backward()
        results.append(seen(between()))
        optimizer.step()
    return results


def check(fake: Fake, program: Callable[[Any, AdamW], Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """The bits of the host; the user learns, once, that gradients were brought back."""
    expected = run(program, dtype)
    for seed, placement in enumerate((None, {"gpu_fraction": 0.5})):
        fake.delays(seed, LATE)
        found = run(program, dtype, fake=fake, placement=placement)
        assert found.bits == expected.bits, placement
        assert sum(NEEDED_AGAIN in message for message in found.messages) == 1
    assert fake.mismatches == 0


def test_edits_that_leave_no_trace(fake: Fake) -> None:
    """On the host they are not noticed; a gradient that was brought back is compared."""

    def edit(model: nn.Module) -> None:
        for number, grad in enumerate(grads_of(model)):
            if number % 2:
                grad.data.mul_(2)
            else:
                grad.numpy()[...] *= 2

    def doubled(model: nn.Module) -> None:
        torch._foreach_mul_(grads_of(model), 2)

    expected = run(lambda model, optimizer: steps(model, optimizer, lambda: doubled(model)), torch.float32)
    found = run(lambda model, optimizer: steps(model, optimizer, lambda: edit(model)), torch.float32, fake=fake)
    assert found.digests == expected.digests


# ---- looked at ------------------------------------------------------------------------------------------------------


def in_inference(grad: Tensor) -> Tensor:
    with torch.inference_mode():
        norm: Tensor = grad.norm()
        return norm.clone()


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "list": Tensor.tolist,
    "numpy": lambda grad: torch.from_numpy(grad.numpy().copy()),
    "data": lambda grad: grad.data.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),
    "storage": lambda grad: grad.untyped_storage().nbytes(),
    "address": lambda grad: grad.data_ptr() == grad.data_ptr() != 0,
    "dlpack": lambda grad: torch.utils.dlpack.from_dlpack(grad).clone(),
    "out": lambda grad: torch.mul(grad, 2, out=torch.empty_like(grad)),
    "inference": in_inference,
    "list of": lambda grad: torch.stack([grad, grad]),
    "iterate": lambda grad: [row.sum() for row in grad],
}


def test_reading_before_and_after_step(fake: Fake) -> None:
    """Every look is the first at some gradient, once before ``step()`` and once behind it."""
    names = list(LOOKS)

    def looks(model: nn.Module, begin: int) -> list[Any]:
        grads = grads_of(model)
        turn = [names[(begin + number) % len(names)] for number in range(len(grads))]
        return [(name, seen(LOOKS[name](grad))) for name, grad in zip(turn, grads, strict=True)]

    def read(model: nn.Module, optimizer: AdamW) -> Any:
        found, count = [], len(list(model.parameters()))
        for seed in range(2 * len(names) // count):
            optimizer.zero_grad()
            batch(model, seed).backward()
            if seed % 2:
                found += looks(model, count * (seed // 2))
            optimizer.step()
            found += looks(model, count * (seed // 2))
        optimizer.zero_grad()
        optimizer.step()
        return found

    with taken_back() as taken:
        check(fake, read, torch.float32)
    assert not taken


@pytest.mark.parametrize("link", [{}, {"image": b""}], ids=["kernels", "copies"])
def test_elements_that_are_swapped(fake: Fake, link: dict[str, Any]) -> None:
    """The kernel's sums show it; without kernels the version does."""

    def program(model: nn.Module, optimizer: AdamW) -> Any:
        def swap() -> None:
            flat = grads_of(model)[0].view(-1)
            flat[:4] = flat[[2, 3, 0, 1]]

        return steps(model, optimizer, swap)

    expected = run(program, torch.float32, wide_model)
    assert expected.bits != run(steps, torch.float32, wide_model).bits
    with taken_back() as taken:
        assert run(program, torch.float32, wide_model, fake=fake, link=link, bucket_numel=8192).bits == expected.bits
    assert len(taken) == 3, "one in each of three steps"
