"""fp32 gradients of bf16 parameters on a device, and their sums in host memory where it has no room for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.optimizer.placeholder import GradientPlaceholder
from tests.support.adamw_training import batch, model_of
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.fake_cuda_training import NEEDED_AGAIN, free_bytes, run
from tests.support.fp32_gradients import (
    SOURCES,
    by_kernels,
    loop,
    losses_of,
    needs_grad_dtype,
    parameters_of,
    precise_loss,
    told,
)

pytestmark = needs_grad_dtype


def _steps(fake: Fake | None, model: nn.Module, optimizer: AdamW, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        with optimizer.accumulate():
            precise_loss(model, 2 * seed).backward()
        precise_loss(model, 2 * seed + 1).backward()
        if fake is not None:
            fake.synchronize()  # behind it the processor reads what is compared, as a kernel would
        optimizer.step()
        if fake is not None:
            fake.synchronize()


def _digests(source: Callable[[nn.Module], None], fake: Fake | None, **options: Any) -> dict[str, str]:
    model = model_of(torch.bfloat16)
    source(model)
    given = {"lr": 1e-2, "threads": 2, "bucket_numel": 256, "max_grad_norm": 0.3, **options}
    with AdamW(model.parameters(), **given) as optimizer:
        _steps(fake, model, optimizer, range(4))
        return optimizer.state_digests()


@pytest.mark.parametrize(
    ("name", "mode", "link"),
    [
        ("hooks", "never", {"image": b""}),
        ("silent_kernels", "always", {"keep_grads": True}),
        ("each", "always", {"placement": {"gpu_fraction": 0.9}}),
    ],
)
def test_the_bits_of_the_host(fake: Fake, name: str, mode: str, link: dict[str, Any]) -> None:
    with on_host():
        expected = _digests(SOURCES[name], None, speculation="never")
    fake.delays(7, 200.0)
    placement = link.pop("placement", None)
    with on_fake_device(fake, **link):
        assert _digests(SOURCES[name], fake, speculation=mode, placement=placement) == expected


def test_a_main_grad_is_not_freed(fake: Fake) -> None:
    """It is its owner's, who may write to it as soon as step() has returned."""
    model = model_of(torch.bfloat16)
    by_kernels(model)
    with on_fake_device(fake), AdamW(model.parameters(), threads=2, bucket_numel=256) as optimizer:
        precise_loss(model, 0).backward()
        fake.synchronize()
        for param in parameters_of(model):
            main = param.main_grad
            assert param.grad is None and main.any() and main.isfinite().all() and main.abs().max() < 10.0
        optimizer.step()
        fake.synchronize()


# ---- sums in host memory, where the device has no room; test_cuda_random.py has more programs ------------------------


FP32: dict[str, Any] = {"accumulate_dtype": "fp32"}


def uneven(model: nn.Module, optimizer: AdamW) -> None:
    for number, count in enumerate((3, 1, 5, 2, 2)):
        optimizer.zero_grad()
        optimizer.max_grad_norm = 0.05 if number == 3 else 100.0
        loop(optimizer, losses_of(model, number, count))
        optimizer.step()


def in_windows(model: nn.Module, optimizer: AdamW) -> None:
    for number, count in enumerate((3, 1, 4)):
        optimizer.zero_grad()
        told(optimizer, losses_of(model, number, count))
        optimizer.step()


def test_room_is_four_bytes_per_parameter(fake: Fake) -> None:
    """Nothing is brought back to be added to. Gradients that stay add up where they are."""
    needed = 4 * sum(param.numel() for param in model_of(torch.bfloat16).parameters())
    for program in (uneven, in_windows):
        for nbytes, in_host_memory in ((needed, False), (needed - 1, True)):
            with free_bytes(nbytes) as added:
                messages = run(program, fake=fake, **FP32).messages
            assert bool(added) is in_host_memory
            assert not in_host_memory or not any(NEEDED_AGAIN in message for message in messages)
    with free_bytes(0) as added:
        run(in_windows, fake=fake, link={"keep_grads": True}, **FP32)
        run(uneven, fake=fake)
    assert not added


def test_what_is_added_by_others_counts_as_well(fake: Fake) -> None:
    """In C++, as autograd does it, but without a hook behind it."""

    def added(model: nn.Module, optimizer: AdamW) -> list[Any]:
        batch(model, 0).backward()
        param = next(model.parameters())
        assert param.grad is not None
        for value in (1.0, 0.1):
            torch.ops.aten.add_.Tensor(param.grad, torch.full_like(param, value, dtype=torch.float32))
            if value == 1.0 and isinstance(param.grad, GradientPlaceholder):
                assert param.grad.in_memory is None, "it waits"
        batch(model, 1).backward()
        optimizer.step()
        return [optimizer.grad_norm]

    expected = run(added, **FP32)
    with free_bytes(0):
        assert run(added, fake=fake, **FP32).bits == expected.bits
