"""Gradients are freed once they are packed: what stands for them, for how long, what memory they take; those that are
read, clipped or edited then have the bits of the host."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import ArgumentError, DeviceError, StateError
from superoffload.optimizer.placeholder import GradientPlaceholder, packed_in
from tests.support.adamw_training import batch, grads_of, model_of, train
from tests.support.fake_cuda import Fake, on_fake_device
from tests.support.fake_cuda_training import LATE, NEEDED_AGAIN, quick_collections, run, seen, taken_back, training
from tests.support.fp32_gradients import needs_grad_dtype

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


@needs_grad_dtype
def test_a_placeholder_is_of_the_dtype_that_its_gradient_may_have(fake: Fake) -> None:
    """In fp32 while the optimizer is open; then as ``p.grad`` may be, without memory, and no gradient any more."""
    model = model_of(torch.bfloat16)
    with on_fake_device(fake), AdamW(model.parameters(), threads=1, accumulate_dtype="fp32") as optimizer:
        batch(model, 0).backward()
        for param in model.parameters():
            assert isinstance(param.grad, GradientPlaceholder) and param.grad.dtype is torch.float32
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


def test_a_clip_that_changes_nothing_undoes_nothing(fake: Fake) -> None:
    def clip(model: nn.Module, optimizer: AdamW) -> Any:
        return steps(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9))

    expected = run(clip)
    with taken_back() as taken:
        assert run(clip, fake=fake).bits == expected.bits
    assert not taken


@pytest.mark.parametrize("link", [{}, {"image": b""}], ids=["kernels", "copies"])
def test_elements_that_are_swapped(fake: Fake, link: dict[str, Any]) -> None:
    """The kernel's sums show it, so nothing is compared a second time. Without kernels the version shows it."""

    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 256), nn.Linear(256, 4)).to(dtype)

    def swap(model: nn.Module) -> None:
        flat = grads_of(model)[0].view(-1)
        flat[:4] = flat[[2, 3, 0, 1]]

    def program(model: nn.Module, optimizer: AdamW) -> Any:
        return steps(model, optimizer, lambda: swap(model))

    expected = run(program, torch.float32, made)
    assert expected.bits != run(steps, torch.float32, made).bits
    read_again = mock.patch("superoffload.engine.inbox.same_bits", side_effect=AssertionError("read again"))
    with taken_back() as taken, nullcontext() if link else read_again:
        found = run(program, torch.float32, made, fake=fake, link=link, bucket_numel=8192)
    assert found.bits == expected.bits
    assert len(taken) == 3, "one in each of three steps"


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


def saved(grad: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def in_inference(grad: Tensor) -> Tensor:
    with torch.inference_mode():
        norm: Tensor = grad.norm()
        return norm.clone()


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "list": Tensor.tolist,
    "numpy": lambda grad: torch.from_numpy(grad.numpy().copy()),
    "data": lambda grad: grad.data.clone(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),
    "save": saved,
    "storage": lambda grad: grad.untyped_storage().nbytes(),
    "address": lambda grad: grad.data_ptr() == grad.data_ptr() != 0,
    "dlpack": lambda grad: torch.utils.dlpack.from_dlpack(grad).clone(),
    "format": lambda grad: f"{grad.flatten()[0]:.4f}",
    "compare": lambda grad: bool((grad == grad).all()),
    "out": lambda grad: torch.mul(grad, 2, out=torch.empty_like(grad)),
    "cpu": lambda grad: grad.cpu().clone(),
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


# ---- added to, set to zero ------------------------------------------------------------------------------------------


def test_what_was_added_or_set_to_zero_takes_no_memory(fake: Fake) -> None:
    def freed(model: nn.Module) -> list[bool]:
        return [packed is not None and packed.in_memory is None for packed in map(packed_in, grads_of(model))]

    def program(model: nn.Module, optimizer: AdamW) -> None:
        batch(model, 0).backward()
        batch(model, 1).backward()
        assert freed(model) == [True] * 6
        train(model, optimizer, range(2))
        optimizer.zero_grad(set_to_none=False)
        assert freed(model) == [True] * 6

    run(program, fake=fake)
