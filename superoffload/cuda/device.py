"""The side of the device that torch owns: its streams and its caching allocator. Tests replace it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Device(Protocol):
    """One accelerator of this process."""

    ordinal: int  # as the driver counts them in this process
    torch_device: torch.device

    def current_stream(self) -> int:
        """The handle of the stream that the calling thread enqueues on."""

    def is_capturing(self) -> bool:
        """Whether what the calling thread enqueues becomes part of a graph instead of being done."""

    def make_stream(self) -> int:
        """A stream that does not wait for the default stream, and lives as long as the process."""

    def empty(self, nbytes: int) -> Tensor:
        """Memory on the device, as uint8, from the allocator that the model uses."""

    def free_bytes(self) -> int:
        """Memory that nothing has used so far, at the peak of forward and backward included."""

    def release(self, gradients: Sequence[Tensor], stream: int) -> None:
        """Their memory may be used again only after what is on ``stream`` (one of ``make_stream``'s) by now."""


class TorchDevice:
    """A CUDA device as torch knows it."""

    def __init__(self, device: torch.device) -> None:
        self.ordinal = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", self.ordinal)
        torch.cuda.init()
        self._streams: dict[int, torch.cuda.Stream] = {}

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def make_stream(self) -> int:
        # Of torch's pool: its streams are never destroyed, so memory that is recorded on them can go at any time.
        stream = torch.cuda.Stream(self.torch_device)
        handle = int(stream.cuda_stream)
        self._streams[handle] = stream
        return handle

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free_bytes(self) -> int:
        device = self.torch_device
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))

    def release(self, gradients: Sequence[Tensor], stream: int) -> None:
        for gradient in gradients:
            gradient.record_stream(self._streams[stream])
