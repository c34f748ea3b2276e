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
from superoffload.engine.bucket import Bucket
from superoffload.errors import StateError
from superoffload.integrations.fsdp2 import ADAPTER, ShardedModule
from superoffload.links.base import PackTicket
from superoffload.links.cuda.link import CudaLink, CudaOptions
from tests.support.adamw_training import batch
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice, LateLink, garbage_like, on_fake_device
from tests.support.fake_cuda_training import deep_model

LATE = 20_000.0  # microseconds


STEPS = 4


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
    """As those of a model whose branches ran on streams of their own: the one that ends last packs for all. CUDA graphs
    write what was packed again at once, on the stream that did not pack."""
    expected = train(two_branches(), lambda: None)
    main, side = fake.current, fake.make_stream()
    model, device = two_branches(), FakeDevice(fake)
    device.reusing = True
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

    class Link(CudaLink):
        def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
            fake.sleep(15_000.0, device.streams[0])
            ticket = super().pack(bucket, grads)
            for grad in grads:
                if grad is not None:
                    device.overwrite(grad, side)
            return ticket

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(written_late)
    link = Link(device, CudaOptions(image=IMAGE, timeout_seconds=60.0, library=fake.library))
    with mock.patch("superoffload.optimizer.adamw_parts.link_for", lambda *_, **__: link):
        try:
            assert train(model, lambda: fake.synchronize(main)) == expected
        finally:
            link.close()
            fake.current = main
            for stream in (main, side, *device.streams):
                fake.synchronize(stream)


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


def test_where_fsdp2_gathers_and_what_it_copies_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = SimpleNamespace(all_gather_copy_in_stream=SimpleNamespace(cuda_stream=7))
    processors = SimpleNamespace(all_gather_copy_in_stream=object())
    for context, streams in ((gathers, [7]), (processors, []), (SimpleNamespace(), [])):  # before the first forward
        module: Any = nn.Linear(2, 2)
        module._get_fsdp_state = lambda context=context: SimpleNamespace(_comm_ctx=context)
        assert ShardedModule(module).streams() == streams
    assert ShardedModule(nn.Linear(2, 2)).streams() == []  # another version of torch, on processors
    with pytest.raises(StateError, match="use delivery='eager'"):
        ShardedModule(nn.Linear(2, 2, device="meta")).streams()
    stream = mock.Mock()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: mock.Mock(current_stream=lambda: stream))
    param: Any = nn.Parameter(torch.zeros(2))
    for mesh, waits in ((None, 0), ("cpu", 0), ("cuda", 1)):
        if mesh is not None:
            param.device_mesh = SimpleNamespace(device_type=mesh)
        ADAPTER.await_gradient(param)
        assert stream.synchronize.call_count == waits
