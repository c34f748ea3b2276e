"""fp32 gradients of bf16 parameters on a device: packed, freed where they are ours, and stepped as on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from superoffload import AdamW
from superoffload.links.cuda.link import CudaLink, CudaOptions
from tests.support.adamw_training import model_of
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice, garbage_like, on_fake_device, on_host
from tests.support.fp32_gradients import SOURCES, by_kernels, declared, needs_grad_dtype, parameters_of, precise_loss

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
        ("grad_dtype", "always", {}),
        ("any", "never", {"keep_grads": True}),
        ("hooks", "always", {"image": b""}),
        ("kernels", "never", {}),
        ("silent_kernels", "always", {"keep_grads": True}),
        ("each", "always", {}),
        ("each", "never", {"image": b""}),
    ],
)
def test_the_bits_of_the_host(fake: Fake, name: str, mode: str, link: dict[str, Any]) -> None:
    with on_host():
        expected = _digests(SOURCES[name], None, speculation="never")
    fake.delays(7, 200.0)
    with on_fake_device(fake, **link):
        assert _digests(SOURCES[name], fake, speculation=mode) == expected


@pytest.mark.parametrize("source", [declared, by_kernels])
def test_state_on_the_device_is_stepped_with_them(fake: Fake, source: Callable[[nn.Module], None]) -> None:
    with on_host():
        expected = _digests(source, None, speculation="never")
    with on_fake_device(fake):
        assert _digests(source, fake, placement={"gpu_fraction": 0.9}) == expected


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


def _two_branches(arrived: Callable[[int, torch.Tensor], None]) -> Any:
    """Calls ``arrived`` with every gradient, and how many came before it."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)]).to(torch.bfloat16)
    seen: list[torch.Tensor] = []

    def hook(param: torch.Tensor) -> None:
        if len(seen) == 1:  # what comes from here on comes in fp32
            declared(nn.ParameterList([one for one in model.parameters() if one.grad is None]))
        arrived(len(seen), param)
        seen.append(param)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    return model


def _train_branches(model: Any, synchronize: Callable[[], None]) -> dict[str, str]:
    with AdamW(model.parameters(), speculation="always", bucket_numel=100_000, threads=1) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            values = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            sum(branch(values).square().mean() for branch in model).backward()
            optimizer.step()
            synchronize()
        assert [len(bucket.pieces) for bucket in optimizer._engine.buckets] == [2, 2]
        return optimizer.state_digests()


def test_gradients_of_other_streams_move_to_buckets_that_are_made_anew(fake: Fake) -> None:
    """The first one is written late, on a stream of its own, and waits in a bucket that is then laid out for others."""
    expected = _train_branches(_two_branches(lambda *_: None), lambda: None)
    main, side, device = fake.current, fake.make_stream(), FakeDevice(fake)

    def written_late(before: int, param: torch.Tensor) -> None:
        assert param.grad is not None
        fake.current = side if before == 0 else main
        if before == 0:
            fake.sleep(100_000.0)
        values = param.grad.clone()
        param.grad.view(-1).view(torch.uint8).copy_(garbage_like(param.grad))
        device.kept.append(param.grad)
        fake.write(fake.current, param.grad, values)

    model = _two_branches(written_late)
    link = CudaLink(device, CudaOptions(image=IMAGE, timeout_seconds=60.0, library=fake.library))
    with mock.patch("superoffload.optimizer.engine_setup.link_for", lambda *_, **__: link):
        try:
            assert _train_branches(model, lambda: fake.synchronize(main)) == expected
        finally:
            link.close()
            fake.current = main
            for stream in (main, side, *device.streams):
                fake.synchronize(stream)
