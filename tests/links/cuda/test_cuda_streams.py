"""Gradients that are written behind the program: on several streams, by reductions, by copies to host memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.distributed import data_parallel as ddp
from superoffload.distributed import fully_shard
from superoffload.distributed.data_parallel import ReducedGradients
from superoffload.errors import StateError
from superoffload.host.signals import Alone
from superoffload.links.cuda.link import CudaLink, CudaOptions
from superoffload.optimizer import module_hooks
from superoffload.optimizer.tracked_param import TrackedParam
from tests.support.adamw_training import batch
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice, LateLink, garbage_like, on_fake_device
from tests.support.link_runs import STEPS, deep_model, train, two_branches

LATE = 20_000.0  # microseconds


def test_gradients_of_several_streams_are_all_waited_for(fake: Fake) -> None:
    """As those of a model whose branches ran on streams of their own: the one that ends last packs for all."""
    expected = train(two_branches(), lambda: None)
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

    with mock.patch("superoffload.optimizer.engine_setup.link_for", link_for):
        try:
            assert train(model, lambda: fake.synchronize(main)) == expected
        finally:
            made[0].close()
            fake.current = main
            for stream in (main, side, *device.streams):
                fake.synchronize(stream)


def test_bits_that_a_delivery_has_changed_are_nobodys_write(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters whose writes are noticed by their bits, as those of DTensors; the copy is over before forward asks."""
    monkeypatch.setattr(TrackedParam, "is_compared", lambda tracked, *, on_device: True)

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
    group: Any = None
    told = (lambda param, gradient: delivered.append(gradient)), (lambda param: None), (lambda: None)
    reduced = ReducedGradients(group, *told, threading.Lock())
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    future: Any = Reduction(torch.arange(5.0))
    reduced.begins(ddp.Reduction(future, params))
    reduced.drain()
    assert [one.tolist() for one in delivered] == [[0.0, 1.0, 2.0], [3.0, 4.0]]


def test_handlers_of_signals_wait_until_all_that_was_reduced_is_handed_over() -> None:
    done: list[str] = []

    def deliver(param: Tensor, gradient: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        done.append("delivered")

    group: Any = None
    reduced = ReducedGradients(group, deliver, lambda param: None, lambda: None, Alone())
    future: Any = Reduction(torch.arange(4.0))
    reduced.begins(ddp.Reduction(future, [nn.Parameter(torch.zeros(2)) for _ in range(2)]))
    before = signal.signal(signal.SIGUSR1, lambda *_: done.append("handled"))
    try:
        reduced.drain()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done == ["delivered", "delivered", "handled"]


def test_a_gradient_on_its_way_to_host_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []

    def get_device_module(kind: str) -> Any:
        stream = SimpleNamespace(synchronize=lambda: waited.append(kind))
        return SimpleNamespace(current_stream=lambda: stream)

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    param: Any = nn.Parameter(torch.zeros(2))
    for mesh in (None, "cpu", "cuda"):
        assert not waited
        if mesh is not None:
            param.device_mesh = SimpleNamespace(device_type=mesh)
        fully_shard.await_offload(param)
    assert waited == ["cuda"]


# ---- parameters that are read on a stream of other code -----------------------------------------------------------


def gathered_elsewhere(fake: Fake, links: list[LateLink], told: bool, seed: int) -> dict[str, str]:
    """Forward reads parameters behind a stream that does not wait for the current one, as FSDP2's all-gathers do."""
    gathering = fake.make_stream()
    model = deep_model(torch.bfloat16)
    options: dict[str, Any] = {"speculation": "never", "threads": 2, "bucket_numel": 1024, "max_grad_norm": 0.5}
    with AdamW(model.parameters(), delivery="on_demand", module=model, **options) as optimizer:
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: fake.synchronize(gathering))
        if told:
            links[0].read_on(gathering)
        fake.delays(seed, 3000.0 * (1 + seed**2))  # longer and longer, for a machine that is slow
        for step in range(5):
            optimizer.zero_grad()
            batch(model, step).backward()
            optimizer.step()
        optimizer.synchronize()
        fake.synchronize()
        return optimizer.state_digests()


def test_streams_that_read_parameters_wait_for_them(fake: Fake) -> None:
    expected = gathered_elsewhere(fake, [], False, 0)
    with on_fake_device(fake) as links:
        assert gathered_elsewhere(fake, links, True, 0) == expected
    for seed in range(8):
        with on_fake_device(fake) as links:
            if gathered_elsewhere(fake, links, False, seed) != expected:
                return
    pytest.fail("no all-gather ever read an old parameter")


class Sharded(nn.Linear):
    """What of a module of fully_shard says on which stream it gathers."""

    def __init__(self, context: Any) -> None:
        super().__init__(2, 2)
        self.context = context

    def _get_fsdp_state(self) -> Any:
        return SimpleNamespace(_comm_ctx=self.context)

    def unshard(self) -> None:
        """By hand."""


def test_where_fsdp2_gathers() -> None:
    def gathering(context: Any) -> list[int]:
        return fully_shard.gathering_streams(Sharded(context))

    assert gathering(SimpleNamespace(all_gather_copy_in_stream=SimpleNamespace(cuda_stream=7))) == [7]
    assert gathering(SimpleNamespace(all_gather_copy_in_stream=object())) == []  # on processors
    assert gathering(SimpleNamespace()) == []  # before the first forward
    assert fully_shard.gathering_streams(nn.Linear(2, 2)) == []  # another version of torch, on processors
    with pytest.raises(StateError, match="use delivery='eager'"):
        fully_shard.gathering_streams(nn.Linear(2, 2, device="meta"))


def test_hooks_name_the_stream_of_the_gather() -> None:
    asked: list[Any] = []
    module = Sharded(SimpleNamespace(all_gather_copy_in_stream=SimpleNamespace(cuda_stream=7)))
    with (
        mock.patch.object(module_hooks, "is_sharded_module", lambda module: isinstance(module, Sharded)),
        mock.patch.object(module_hooks, "gathered_with", lambda module: None),
    ):
        hooks = module_hooks.ModuleHooks(module, lambda params, streams=(): asked.append((params, streams)))
        module(torch.zeros(2))
        hooks.remove()
    module(torch.zeros(2))
    assert asked == [(None, [7])]
