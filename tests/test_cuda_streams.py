"""Gradients that are written behind the program: on several streams, by reductions, by copies to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.bits import checksum
from superoffload.cuda.link import CudaLink, CudaOptions
from superoffload.integrations import fsdp2
from superoffload.integrations.ddp import ReducedGradients
from superoffload.tracked import Tracked
from tests.fake_cuda import IMAGE, Fake, FakeDevice, LateLink, garbage_like, on_fake_device

STEPS = 4
LATE = 20_000.0  # microseconds


@pytest.fixture(scope="module")
def fake() -> Fake:
    return Fake()


def two_branches() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])


def train(model: Any, synchronize: Any) -> dict[str, str]:
    """Both branches' gradients are in one bucket."""
    with AdamW(model.parameters(), speculation="always", bucket_numel=100_000, threads=1) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            values = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            sum(branch(values).square().mean() for branch in model).backward()
            optimizer.step()
            synchronize()
        return optimizer.state_digests()


def test_gradients_of_several_streams_are_all_waited_for(fake: Fake) -> None:
    """As those of a model whose branches ran on streams of their own: the one that ends last packs for all."""
    expected = train(two_branches(), lambda: None)
    fake.reset()
    main = fake.current
    side = fake.make_stream()
    model = two_branches()
    device = FakeDevice(fake)

    arrived = 0

    def written_late(param: Tensor) -> None:
        """The first one of a backward on a stream of its own, where it comes last."""
        nonlocal arrived
        assert param.grad is not None
        fake.current = side if arrived == 0 else main
        if arrived == 0:
            fake.sleep(LATE)
        arrived = (arrived + 1) % len(list(model.parameters()))
        values = param.grad.clone()
        param.grad.view(-1).view(torch.uint8).copy_(garbage_like(param.grad))
        device.kept.append(param.grad)
        fake.write(fake.current, param.grad, values)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(written_late)
    made: list[CudaLink] = []

    def link_for(params: Sequence[Tensor], **given: Any) -> CudaLink:
        made.append(CudaLink(device, CudaOptions(image=IMAGE, timeout_seconds=60.0, library=fake.library)))
        return made[-1]

    with mock.patch("superoffload.optimizer.parameters.link_for", link_for):
        try:
            assert train(model, lambda: fake.synchronize(main)) == expected
        finally:
            made[0].close()
            fake.current = main
            for stream in (main, side, *device.streams):
                fake.synchronize(stream)


def test_bits_that_a_delivery_has_changed_are_nobodys_write(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters whose writes are noticed by their bits, as those of DTensors; the copy is over before forward asks."""
    monkeypatch.setattr(Tracked, "_checksum", lambda tracked: checksum(tracked.param.detach().reshape(-1)))
    fake.reset()

    def run(model: nn.Module, links: list[LateLink]) -> dict[str, str]:
        with AdamW(model.parameters(), delivery="on_demand", module=model, threads=1) as optimizer:
            for step in range(STEPS):
                model(torch.full((2, 24), 0.1 * (step + 1))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if links:  # the submitter has enqueued all copies
                    links[0].drain(60.0)
            return optimizer.state_digests()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 8))

    expected = run(model(), [])
    with on_fake_device(fake) as links:
        assert run(model(), links) == expected


class Reduction:
    """A future as NCCL's: done once it is enqueued; only wait() orders what is read after it."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient
        self.waited = False

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        self.waited = True
        return self.gradient

    def value(self) -> Tensor:
        return self.gradient if self.waited else torch.full_like(self.gradient, torch.nan)


def test_a_reduction_is_waited_for_before_it_is_read() -> None:
    delivered: list[Tensor] = []
    model = SimpleNamespace(process_group=None, register_comm_hook=lambda state, hook: None)
    reduced = ReducedGradients(model, lambda param, gradient: delivered.append(gradient))  # type: ignore[arg-type]
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    reduced._waiting.append((Reduction(torch.arange(5.0)), params))  # type: ignore[arg-type]
    reduced.drain()
    assert [one.tolist() for one in delivered] == [[0.0, 1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(("mesh", "waits"), [("cuda", 1), ("cpu", 0), (None, 0)])
def test_a_gradient_on_its_way_to_host_memory_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, mesh: str | None, waits: int
) -> None:
    waited: list[str] = []

    def get_device_module(kind: str) -> Any:
        stream = SimpleNamespace(synchronize=lambda: waited.append(kind))
        return SimpleNamespace(current_stream=lambda: stream)

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    param = nn.Parameter(torch.zeros(2))
    if mesh is not None:
        param.device_mesh = SimpleNamespace(device_type=mesh)  # type: ignore[attr-defined]
    fsdp2.await_offload(param)
    assert waited == ["cuda"] * waits
