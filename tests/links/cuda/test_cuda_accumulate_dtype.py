"""accumulate_dtype="fp32" over a device: what was packed and freed is the sum so far, and is added to in fp32."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import StateError
from superoffload.optimizer.packed_gradient import PackedGradient, packed_in
from tests.support.adamw_training import batch, grads_of, model_of
from tests.support.fake_cuda import Fake, on_fake_device
from tests.support.fp32_gradients import declared, needs_grad_dtype
from tests.support.freed_gradients import (
    NEEDED_AGAIN,
    MakeModel,
    branches,
    images,
    on_the_device,
    on_the_host,
    taken_back,
)
from tests.support.link_runs import LATE
from tests.support.micro_batches import WINDOWS, Window, in_own_dtype, loop, losses_of, summed, told, train_windows

pytestmark = needs_grad_dtype
LINKS: dict[str, dict[str, Any]] = {"freed": {}, "kept": {"keep_grads": True}, "copies": {"image": b""}}


def wide(make: MakeModel, dtype: torch.dtype) -> nn.Module:
    """For the reference, which is given sums in fp32."""
    model = make(dtype)
    declared(model)
    return model


# What the processor adds to a gradient that was kept would come before what the fake writes there late.
@pytest.mark.parametrize(
    ("window", "link", "dtype"),
    [
        (loop, "freed", torch.bfloat16),
        (loop, "copies", torch.float16),
        (told, "freed", torch.float16),
        (told, "kept", torch.bfloat16),
    ],
)
def test_the_bits_of_sums_that_torch_makes_in_fp32(fake: Fake, window: Window, dtype: torch.dtype, link: str) -> None:
    def ended(optimizer: AdamW, losses: Iterable[Tensor]) -> None:
        window(optimizer, losses)
        fake.synchronize()  # behind it the processor writes to gradients that were kept, as a kernel would

    expected = on_the_host(partial(train_windows, summed), dtype, partial(wide, model_of))
    placed: dict[str, Any] = {"placement": {"gpu_fraction": 0.5}} if link != "copies" else {}
    for seed, options in enumerate(({"speculation": "never"}, placed)):
        fake.delays(seed, LATE)
        given: dict[str, Any] = {"link": LINKS[link], "accumulate_dtype": "fp32", **options}
        found, messages, _ = on_the_device(fake, partial(train_windows, ended), dtype, **given)
        assert found == expected, options
        assert any(NEEDED_AGAIN in message for message in messages) or window is told
    assert fake.mismatches == 0


def few_windows(window: Window, model: nn.Module, optimizer: Any) -> None:
    for number, count in enumerate(WINDOWS):
        optimizer.zero_grad()
        window(optimizer, losses_of(model, number, count))
        optimizer.step()


@pytest.mark.parametrize("make", [branches, images])
def test_buckets_made_anew_and_other_orders_of_memory(fake: Fake, make: MakeModel) -> None:
    expected = on_the_host(partial(few_windows, summed), torch.bfloat16, partial(wide, make))
    fake.delays(5, LATE)
    found, *_ = on_the_device(fake, partial(few_windows, loop), torch.bfloat16, make, accumulate_dtype="fp32")
    assert found == expected
    assert on_the_host(partial(few_windows, loop), torch.bfloat16, make)[1] != expected[1], "in bf16 it is another sum"


def test_only_the_first_window_brings_sums_back(fake: Fake) -> None:
    def learned(model: nn.Module, optimizer: AdamW) -> list[Any]:
        few_windows(loop, model, optimizer)
        with taken_back() as taken:
            for seed in range(2):
                optimizer.zero_grad()
                batch(model, 2 * seed).backward()
                batch(model, 2 * seed + 1).backward()
                optimizer.step()
        assert not taken
        return []

    on_the_device(fake, learned, torch.bfloat16, accumulate_dtype="fp32")


def test_what_is_brought_back_between_is_the_sum_so_far(fake: Fake) -> None:
    """Read and clipped by hand, before and behind what is added."""

    def read(adding: Any, model: nn.Module, optimizer: AdamW) -> list[Any]:
        params, seen = list(model.parameters()), []
        for number in range(3):
            optimizer.zero_grad()
            for micro in range(3):
                loss = batch(model, 10 * number + micro)
                if adding is summed:
                    so_far = [param.grad for param in params]
                    for param, before, grad in zip(params, so_far, in_own_dtype(loss, params), strict=True):
                        param.grad = grad.float() if before is None else before + grad.float()
                else:
                    loss.backward()
                assert all(grad.dtype is torch.float32 for grad in grads_of(model))
                if micro == number:
                    nn.utils.clip_grad_norm_(params, 0.05)
                seen.append([grad.clone() for grad in grads_of(model)] if micro == 1 else None)
            optimizer.step()
        return seen

    expected = on_the_host(partial(read, summed), torch.bfloat16, partial(wide, model_of), speculation="never")
    fake.delays(6, LATE)
    found, *_ = on_the_device(fake, partial(read, loop), torch.bfloat16, accumulate_dtype="fp32")
    assert found == expected


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
        with pytest.raises(StateError, match="its optimizer is closed"):
            param.grad.norm()  # type: ignore[union-attr]  # that is asserted above
    assert first.grad is not None and not first.grad.any(), "it was set to zero, which needs no optimizer"
