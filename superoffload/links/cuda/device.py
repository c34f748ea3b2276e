"""Wraps what torch owns of a device: its streams and its caching allocator. Tests replace it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_AHEAD = -1  # kernels of a stream with this priority go before those of ordinary streams
_ASK_BEFORE_REUSE = ("native", "cudaMallocAsync")  # allocators of torch; others may ignore record_stream


class Device(Protocol):
    """Represents one accelerator of this process."""

    ordinal: int  # as the driver counts them in this process
    torch_device: torch.device

    def current_stream(self) -> int:
        """Returns the handle of the stream that the calling thread enqueues on."""

    def is_capturing(self) -> bool:
        """Tells whether the calling thread's work is captured into a graph instead of being done."""

    def make_stream(self, *, ahead: bool = False) -> int:
        """Makes a stream that does not wait for the default stream, and lives as long as the process.

        ``ahead``: its kernels start before those of ordinary streams that have not begun.
        """

    def empty(self, nbytes: int) -> Tensor:
        """Allocates memory on the device, as uint8, from the allocator that the model uses."""

    def free_bytes(self) -> int:
        """Counts the memory that has stayed unused so far, also at the peak of forward and backward."""

    def reuses_unasked(self) -> bool:
        """Tells whether gradients that arrive now may be overwritten although ``release`` has named a stream."""

    def release(self, gradients: Sequence[Tensor], stream: int) -> None:
        """Lets the gradients' memory be used again only after what is on ``stream`` when it is freed.

        Memory that was allocated for this stream behaves so anyway, at no cost.
        """


class TorchDevice:
    """Wraps a CUDA device of torch."""

    def __init__(self, device: torch.device) -> None:
        self.ordinal = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", self.ordinal)
        torch.cuda.init()
        backend = torch.cuda.get_allocator_backend()
        self._asks = backend in _ASK_BEFORE_REUSE
        self._streams: dict[int, torch.cuda.Stream] = {}  # by handle
        if backend == "cudaMallocAsync":  # release() records streams on purpose
            warnings.filterwarnings("ignore", "Called record_stream on tensor whose original creation stream")

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def is_capturing(self) -> bool:
        with torch.cuda.device(self.torch_device):  # torch asks the current device, which need not be ours
            return torch.cuda.is_current_stream_capturing()

    def make_stream(self, *, ahead: bool = False) -> int:
        # A stream of torch's pool is never destroyed, so memory that is recorded on it can be freed at any time.
        return int(torch.cuda.Stream(self.torch_device, priority=_AHEAD if ahead else 0).cuda_stream)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free_bytes(self) -> int:
        device = self.torch_device
        free, total = torch.cuda.mem_get_info(device)
        ours = min(free + torch.cuda.memory_reserved(device), _fraction(device) * total)
        return int(ours - peak_active_bytes(device))

    def reuses_unasked(self) -> bool:
        return not self._asks or _replays_graphs(self.ordinal)

    def release(self, gradients: Sequence[Tensor], stream: int) -> None:
        if not gradients:
            return
        reader = self._stream(stream)
        for gradient in gradients:
            gradient.record_stream(reader)

    def _stream(self, handle: int) -> torch.cuda.Stream:
        if handle not in self._streams:
            if handle == 0:  # ExternalStream would make a new stream of it
                self._streams[handle] = torch.cuda.default_stream(self.torch_device)
            else:
                self._streams[handle] = torch.cuda.ExternalStream(handle, self.torch_device)
        return self._streams[handle]


def peak_active_bytes(device: torch.device | None = None) -> int:
    """Returns the most memory that was in use at a time since ``torch.cuda.reset_peak_memory_stats``.

    A freed gradient counts until the pack stream has read it: its memory is no longer allocated, but still occupied.
    """
    return _in_use(device, "peak")


def active_bytes(device: torch.device | None = None) -> int:
    """Returns the memory that is in use now, counted likewise."""
    return _in_use(device, "current")


def _in_use(device: torch.device | None, when: str) -> int:
    found = torch.cuda.memory_stats(device)
    # cudaMallocAsync counts only allocated bytes; elsewhere the active bytes are never fewer.
    return max(int(found.get(f"{kind}_bytes.all.{when}", 0)) for kind in ("active", "allocated"))


def _fraction(device: torch.device) -> float:
    """Returns the share of the device that ``torch.cuda.set_per_process_memory_fraction`` allows this process."""
    get = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if get is None:  # older torch
        return 1.0
    try:
        return float(get(device))
    except RuntimeError:  # an allocator without fractions
        return 1.0


def _replays_graphs(ordinal: int) -> bool:
    """Tells whether inductor's CUDA graph trees have run on this device (``mode="reduce-overhead"``).

    Each of their graphs writes its gradients to the same addresses at every replay. Later graphs of the same pool reuse
    these addresses once nothing refers to the gradient. Both ignore ``record_stream``.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    get_manager = getattr(trees, "get_manager", None)
    if get_manager is None:  # an unknown version: waiting is always right
        return True
    try:
        return get_manager(ordinal, create_if_none_exists=False) is not None
    except AssertionError:  # older versions, in a thread that has run nothing compiled
        return False
