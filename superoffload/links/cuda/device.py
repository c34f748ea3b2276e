"""The side of the device that torch owns: its streams and its caching allocator. Tests replace it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_AHEAD = -1  # the priority of a stream whose kernels go before those of ordinary streams
_ASK_BEFORE_REUSE = ("native", "cudaMallocAsync")  # torch's allocators; those of others may ignore record_stream


class Device(Protocol):
    """One accelerator of this process."""

    ordinal: int  # as the driver counts them in this process
    torch_device: torch.device

    def current_stream(self) -> int:
        """The handle of the stream that the calling thread enqueues on."""

    def is_capturing(self) -> bool:
        """Whether what the calling thread enqueues becomes part of a graph instead of being done."""

    def make_stream(self, *, ahead: bool = False) -> int:
        """A stream that does not wait for the default stream, and lives as long as the process.

        ``ahead``: its kernels start before those of ordinary streams that have not begun.
        """

    def empty(self, nbytes: int) -> Tensor:
        """Memory on the device, as uint8, from the allocator that the model uses."""

    def free_bytes(self) -> int:
        """Memory that nothing has used so far, at the peak of forward and backward included."""

    def reuses_unasked(self) -> bool:
        """Whether memory of gradients that arrive now may be written again although ``release`` has named a stream."""

    def release(self, gradients: Sequence[Tensor], stream: int) -> None:
        """Their memory may be used again only after what is on ``stream`` when it is freed.

        For memory that was allocated for this stream that is so anyway, and costs nothing.
        """


class TorchDevice:
    """A CUDA device as torch knows it."""

    def __init__(self, device: torch.device) -> None:
        self.ordinal = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device("cuda", self.ordinal)
        torch.cuda.init()
        backend = torch.cuda.get_allocator_backend()
        self._asks = backend in _ASK_BEFORE_REUSE
        self._streams: dict[int, torch.cuda.Stream] = {}  # by handle
        if backend == "cudaMallocAsync":  # in release(), where that is as it should be
            warnings.filterwarnings("ignore", "Called record_stream on tensor whose original creation stream")

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.torch_device).cuda_stream)

    def is_capturing(self) -> bool:
        with torch.cuda.device(self.torch_device):  # torch asks the current device, which need not be ours
            return torch.cuda.is_current_stream_capturing()

    def make_stream(self, *, ahead: bool = False) -> int:
        # Of torch's pool: its streams are never destroyed, so memory that is recorded on them can go at any time.
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
            if handle == 0:  # of which ExternalStream would make a new stream
                self._streams[handle] = torch.cuda.default_stream(self.torch_device)
            else:
                self._streams[handle] = torch.cuda.ExternalStream(handle, self.torch_device)
        return self._streams[handle]


def peak_active_bytes(device: torch.device | None = None) -> int:
    """The most memory that was in use at a time since ``torch.cuda.reset_peak_memory_stats``.

    A freed gradient counts until the pack stream has read it: its memory is allocated no more, and nothing else can
    have it.
    """
    return _in_use(device, "peak")


def active_bytes(device: torch.device | None = None) -> int:
    """Likewise, now."""
    return _in_use(device, "current")


def _in_use(device: torch.device | None, when: str) -> int:
    found = torch.cuda.memory_stats(device)
    # cudaMallocAsync counts what is allocated only; elsewhere the active bytes are never fewer.
    return max(int(found.get(f"{kind}_bytes.all.{when}", 0)) for kind in ("active", "allocated"))


def _fraction(device: torch.device) -> float:
    """Of the device's memory, that ``torch.cuda.set_per_process_memory_fraction`` has left to this process."""
    get = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if get is None:  # older torch
        return 1.0
    try:
        return float(get(device))
    except RuntimeError:  # an allocator that knows of none
        return 1.0


def _replays_graphs(ordinal: int) -> bool:
    """Whether inductor's CUDA graph trees have run something on this device (``mode="reduce-overhead"``).

    Each of their graphs writes its gradients to the same addresses at every replay. Later graphs of the same pool
    have them too, once nothing refers to the gradient. What was recorded with ``record_stream`` counts for neither.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    get_manager = getattr(trees, "get_manager", None)
    if get_manager is None:  # a version that we do not know: waiting is always right
        return True
    try:
        return get_manager(ordinal, create_if_none_exists=False) is not None
    except AssertionError:  # older versions, in a thread that has run nothing compiled
        return False
