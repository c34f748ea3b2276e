"""DistributedDataParallel over gloo with gradients on a GPU: sums that come back late, on streams of gloo's own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from superoffload.integrations import ddp
from superoffload.links.cuda.link import CudaLink, CudaOptions
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice, garbage_like, on_host
from tests.support.rank_processes import loss_of, net, on_ranks

STEPS = 4
LATE = 20_000.0  # microseconds


class Streams:
    """What ddp.py uses of ``torch.cuda``, over the fake driver. Backward runs on a stream that is not the default."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.default = FakeStream(self, fake.make_stream())
        self.backward = FakeStream(self, fake.current)
        self.made: list[FakeStream] = []

    def make(self, device: torch.device) -> FakeStream:
        self.made.append(FakeStream(self, self.fake.make_stream()))
        return self.made[-1]

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self.fake.current = self.fake.current, stream.handle
        yield
        self.fake.current = before

    @contextmanager
    def installed(self) -> Iterator[None]:
        """``torch.cuda`` has these streams, and tensors of the CPU count as tensors of the GPU."""
        with ExitStack() as stack:
            for target, name, value in (
                (torch.cuda, "Stream", self.make),
                (torch.cuda, "stream", self.use),
                (torch.cuda, "default_stream", lambda device: self.default),
                (torch.cuda, "current_stream", lambda device: FakeStream(self, self.fake.current)),
                (ddp, "_on_gpu", lambda param: True),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            yield

    def finish(self) -> None:
        for stream in (self.default, self.backward, *self.made):
            self.fake.synchronize(stream.handle)


class FakeStream:
    def __init__(self, streams: Streams, handle: int) -> None:
        self.streams, self.handle = streams, handle

    def wait_stream(self, other: FakeStream) -> None:
        driver = self.streams.fake.driver
        event = ctypes.c_void_p()
        calls = [
            driver.cuEventCreate(ctypes.byref(event), 2),
            driver.cuEventRecord(event, ctypes.c_void_p(other.handle)),
            driver.cuStreamWaitEvent(ctypes.c_void_p(self.handle), event, 0),
        ]
        assert calls == [0, 0, 0]


def trained(streams: Streams | None = None) -> dict[str, str]:
    model = DistributedDataParallel(net(torch.float32), bucket_cap_mb=0.005)
    params = [param for param in model.parameters() if param.requires_grad]
    options: dict[str, Any] = {"speculation": "always", "threads": 1, "bucket_numel": 4096, "rank_timeout": 20.0}
    options["rank_check"] = "off"  # its early full check reads parameters without the stand-in's stream
    with AdamW(params, model=model, max_grad_norm=0.5, **options) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if streams is not None:
                streams.finish()
        return optimizer.state_digests()


def with_late_sums(copied_on: str) -> bool:
    """In a rank: the state is that of a run whose sums are there at once. ``copied_on``: whose stream has the copy."""
    with on_host():
        expected = trained()
    fake = Fake()
    streams = Streams(fake)
    device = FakeDevice(fake)
    kept: list[Tensor] = []

    def late(group: Any, bucket: Any) -> Any:
        """Reduces as gloo does; the sum is copied back late, and the future is done before that has run."""
        buffer = allreduce_hook(group, bucket).wait()
        total = buffer.clone()
        buffer.view(torch.uint8).copy_(garbage_like(buffer))
        kept.append(buffer)
        stream = getattr(streams, copied_on).handle
        fake.sleep(LATE, stream)
        fake.write(stream, buffer, total)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    made: list[CudaLink] = []

    def link_for(params: Sequence[Tensor], **_: Any) -> CudaLink:
        made.append(CudaLink(device, CudaOptions(image=IMAGE, timeout_seconds=60.0, library=fake.library)))
        return made[-1]

    with (
        mock.patch("superoffload.optimizer.adamw_parts.link_for", link_for),
        mock.patch.object(default_hooks, "allreduce_hook", late),
        streams.installed(),
    ):
        try:
            return trained(streams) == expected
        finally:
            streams.finish()
            made[0].close()
            for handle in device.streams:
                fake.synchronize(handle)


@pytest.mark.parametrize("copied_on", ["default", "backward"])
def test_sums_that_gloo_copies_back_late_are_waited_for(fake: Fake, copied_on: str) -> None:
    """On the default stream of gloo's thread, as torch 2.6 to 2.10 have it, or on that of the reader."""
    assert on_ranks(2, with_late_sums, copied_on) == [True, True]
