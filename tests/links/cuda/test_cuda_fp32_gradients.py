"""fp32 gradients of bf16 parameters on a device, and their sums in host memory where it has no room for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.errors import DeviceError, StateError
from superoffload.optimizer.placeholder import GradientPlaceholder, packed_in
from tests.support.adamw_training import batch, grads_of, model_of
from tests.support.fake_cuda import Fake, on_fake_device, on_host
from tests.support.fake_cuda_training import LATE, NEEDED_AGAIN, OPTIONS, free_bytes, run, seen
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


def bytes_in_use(grad: Tensor | None) -> int:
    packed = packed_in(grad)
    tensors = [grad] if packed is None else [packed.in_memory, packed.addend]
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)


def uneven(model: nn.Module, optimizer: AdamW) -> None:
    for number, count in enumerate((3, 1, 5, 2, 2)):
        optimizer.zero_grad()
        optimizer.max_grad_norm = 0.05 if number == 3 else 100.0
        loop(optimizer, losses_of(model, number, count))
        optimizer.step()


def large(dtype: torch.dtype) -> nn.Sequential:
    """Its weights are in several buckets each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 4)).to(dtype)


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


def test_what_is_known_not_to_be_the_last_pass_is_not_stepped(fake: Fake) -> None:
    """So nothing is undone; the last pass is stepped during backward, once all gradients of a bucket have it."""
    counts: list[Any] = []

    def counted(model: nn.Module, optimizer: AdamW) -> None:
        for number in range(3):
            optimizer.zero_grad()
            undone = optimizer.stats()["buckets_undone"]  # with the verdict, what waits for a worker is taken back
            with optimizer.accumulate():
                loop(optimizer, losses_of(model, number, 2))
            assert optimizer.stats()["buckets_speculated"] == sum(counts)
            batch(model, 10 * number + 3).backward()
            counts.append(optimizer.stats()["buckets_speculated"] - sum(counts))
            assert optimizer.stats()["buckets_undone"] == undone
            optimizer.step()

    with free_bytes(0) as added:
        run(counted, make=large, fake=fake, **FP32)
    assert added and all(count >= 5 for count in counts)


def test_only_gradients_that_wait_for_their_bucket_take_memory(fake: Fake) -> None:
    def layers(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), *(nn.Linear(32, 32) for _ in range(20)), nn.Linear(32, 4)).to(dtype)

    peak = 0

    def measured(model: nn.Module, optimizer: AdamW) -> None:
        def count(_: Tensor) -> None:
            nonlocal peak
            peak = max(peak, sum(bytes_in_use(param.grad) for param in model.parameters()))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(count)  # behind ours
        for number in range(3):
            optimizer.zero_grad()
            (told if number else loop)(optimizer, losses_of(model, number, 4))
            count(torch.empty(0))
            optimizer.step()

    with free_bytes(0) as added:
        run(measured, make=layers, fake=fake, bucket_numel=2048, **FP32)
    assert added and 0 < peak <= 2 * 4 * 2048 < 4 * sum(p.numel() for p in layers(torch.bfloat16).parameters()) / 4


def _read(param: Any) -> Any:
    return seen(param.grad)


def _replace(param: Any) -> None:
    param.grad = param.grad + 1


@pytest.mark.parametrize("hook", [_read, _replace])
def test_hooks_before_ours_find_the_sum(fake: Fake, hook: Callable[[Any], Any]) -> None:
    found: list[Any] = []

    def hooked(dtype: torch.dtype) -> nn.Module:
        found.clear()
        model = model_of(dtype)
        for param in model.parameters():  # before the optimizer has its own
            param.register_post_accumulate_grad_hook(lambda param: found.append(hook(param)))
        return model

    expected = run(uneven, make=hooked, **FP32).bits, list(found)
    fake.delays(2, LATE)
    with free_bytes(0):
        assert (run(uneven, make=hooked, fake=fake, **FP32).bits, found) == expected


@pytest.mark.parametrize("then", ["another pass", "read", "zeroed"])
def test_what_is_added_by_others_counts_as_well(fake: Fake, then: str) -> None:
    """In C++, as autograd does it, but without a hook behind it."""

    def added(model: nn.Module, optimizer: AdamW) -> list[Any]:
        batch(model, 0).backward()
        param = next(model.parameters())
        assert param.grad is not None
        for value in (1.0, 0.1):
            torch.ops.aten.add_.Tensor(param.grad, torch.full_like(param, value, dtype=torch.float32))
            if value == 1.0 and isinstance(param.grad, GradientPlaceholder):
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

    expected = run(added, **FP32)
    with free_bytes(0):
        assert run(added, fake=fake, **FP32).bits == expected.bits


def test_an_error_leaves_what_was_to_be_added_in_the_gradient(fake: Fake) -> None:
    """``step()`` refuses, since other gradients are missing; what is there is right."""
    model = model_of(torch.bfloat16)
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
