"""Takes the steps of `python -m benchmarks.link` over the stand-in for the driver, where there is no GPU.

The stand-in's streams are threads and its copies are `memcpy`. So the calling thread's processor time says most about
a step: it is that of Python and of what it calls. The stand-in counts copies and launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.link.steps import Rig
from superoffload.engine.bucket import Bucket
from superoffload.links.base import PackTicket
from superoffload.links.cuda.link import CudaLink, CudaOptions
from tests.support.fake_cuda import IMAGE, Fake, FakeDevice

_COUNTED = {
    "copies": ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
    "launches": ("cuLaunchKernel",),
    "event records": ("cuEventRecord",),
    "stream waits": ("cuStreamWaitEvent",),
}


class _Device(FakeDevice):
    """Leaves freed memory as it is; overwriting it would take longer than what is measured."""

    def empty(self, nbytes: int) -> Tensor:
        self.kept.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.kept[-1]


class _Link(CudaLink):
    """Keeps freed gradients until the kernels that read them have ended, as a device's allocator does."""

    def __init__(self, device: FakeDevice, options: CudaOptions) -> None:
        super().__init__(device, options)
        self._kept = device.kept

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        self._kept.extend(grad for grad in grads if grad is not None)
        return super().pack(bucket, grads)


@contextmanager
def stand_in() -> Iterator[Rig]:
    """Yields a rig whose optimizers train over the stand-in."""
    fake = Fake()
    devices: list[FakeDevice] = []

    def link_for(params: Sequence[Tensor], **_: Any) -> CudaLink:
        devices[:] = [_Device(fake)]
        return _Link(devices[0], CudaOptions(image=IMAGE, library=fake.library))

    def synchronize() -> None:
        for device in devices:
            for stream in (fake.current, *device.streams):
                fake.synchronize(stream)
            device.kept.clear()

    def calls() -> dict[str, int]:
        return {name: sum(map(fake.calls, symbols)) for name, symbols in _COUNTED.items()}

    with mock.patch("superoffload.optimizer.engine_setup.link_for", link_for):
        yield Rig(torch.device("cpu"), synchronize, calls)
