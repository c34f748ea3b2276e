"""A CudaLink over the fake driver (csrc/tests/fake_*.cpp) under CPU tensors: whole optimizers, without a GPU.

What a device does late, the fake does late: a gradient is written by an operation on the current stream, parameters are
read by one, freed gradients are overwritten as soon as the allocator may use their memory again.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine import layout
from superoffload.engine.bucket import Bucket, Shard
from superoffload.host.bits import BitSums, Sums
from superoffload.links.base import PackTicket
from superoffload.links.cuda.link import CudaLink, CudaOptions
from superoffload.links.host import HostLink
from tests.support.checkout import compiled
from tests.support.emulated_kernels import library_path

_SOURCES = [f"csrc/tests/fake_{name}.cpp" for name in ("cuda", "device", "kernels", "controls")]
_HEADERS = [
    *(f"csrc/tests/fake_{name}.h" for name in ("device", "kernels")),
    *(f"csrc/{name}" for name in ("cuda/driver.h", "cuda/device_bucket.h", "arm_adam/lanes_scalar.h")),
]
_GARBAGE = 0x7F  # a byte; of these every format makes large values

IMAGE = b"kernels"  # the fake knows its kernels by name
# csrc/tests/fake_controls.cpp: name -> result, arguments
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_FUNCTIONS: dict[str, Sequence[Any]] = {
    "stream": [_POINTER],
    "synchronize": [None, _POINTER],
    "sleep": [None, _POINTER, ctypes.c_double],
    "write": [None, *[_POINTER] * 3, _SIZE],
    "read": [None, *[_POINTER] * 3, _SIZE],
    "reset": [None],
    "delays": [None, ctypes.c_uint64, ctypes.c_double],
    "drop_waits": [None, _POINTER, _POINTER],
    "fail": [None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
    "break": [None, ctypes.c_int],
    "write_values": [None, ctypes.c_int],
    "registrable": [None, _SIZE],
    "registered_bytes": [_SIZE],
    "calls": [ctypes.c_long, ctypes.c_char_p],
    "mismatches": [ctypes.c_long],
}


def build() -> Path:
    return compiled("libfakecuda.so", _SOURCES, _HEADERS, ["-ffp-contract=off", "-pthread", "-Icsrc"])


class Fake:
    """The fake's own functions, and one current stream."""

    def __init__(self) -> None:
        self.library = str(build())
        os.environ["FAKE_CUDA_KERNELS"] = str(library_path())  # read by the fake at the first launch
        self._functions = ctypes.CDLL(self.library)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(self._functions, f"fake_cuda_{name}")
            function.restype, function.argtypes = result, arguments
        self._streams: list[int] = []  # that may have work left
        self._devices: list[FakeDevice] = []  # with memory for that work
        self.current = self.make_stream()

    @property
    def driver(self) -> ctypes.CDLL:
        """The driver's own functions, with a context that is current in the calling thread."""
        context = ctypes.c_void_p()
        self._functions.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        self._functions.cuCtxSetCurrent(context)
        return self._functions

    def make_stream(self) -> int:
        self._streams.append(int(self._functions.fake_cuda_stream()))
        return self._streams[-1]

    def has(self, device: FakeDevice) -> None:
        """It stays until all streams are over."""
        self._devices.append(device)

    def finish(self) -> None:
        """Until all that was enqueued on any stream is over; then the memory may go that it is about."""
        for device in self._devices:
            device.over = True
        for stream in self._streams:
            self.synchronize(stream)
        self._streams = [self.current]
        self._devices.clear()

    def __getattr__(self, name: str) -> Any:
        """Such as ``delays(seed, microseconds)``: the function ``fake_cuda_delays``."""
        plain = {"breaks": "break", "writes_values": "write_values"}.get(name, name)  # of which one is a keyword
        if plain not in _FUNCTIONS:
            raise AttributeError(name)
        return getattr(self._functions, f"fake_cuda_{plain}")

    def fail(self, symbol: str, result: int, calls: int = 0) -> None:
        self._functions.fake_cuda_fail(symbol.encode(), calls, result)

    def synchronize(self, stream: int | None = None) -> None:
        self._functions.fake_cuda_synchronize(stream or self.current)

    def sleep(self, microseconds: float, stream: int | None = None) -> None:
        self._functions.fake_cuda_sleep(stream or self.current, microseconds)

    def write(self, stream: int, target: Tensor, source: Tensor) -> None:
        self._functions.fake_cuda_write(stream, target.data_ptr(), source.data_ptr(), target.nbytes)

    def read(self, stream: int, tensor: Tensor, expected: Tensor | None = None) -> None:
        """It must then hold what ``expected``, or else itself, holds now."""
        source = tensor if expected is None else expected
        self._functions.fake_cuda_read(stream, tensor.data_ptr(), source.data_ptr(), tensor.nbytes)

    def calls(self, symbol: str) -> int:
        return int(self._functions.fake_cuda_calls(symbol.encode()))

    @property
    def mismatches(self) -> int:
        return int(self._functions.fake_cuda_mismatches())


class Memory:
    """What an allocator counts: bytes that are in use, in its units, and the most of them at a time."""

    def __init__(self) -> None:
        self.active = 0
        self.peak = 0
        self.prompt = False  # what was released to another stream is free at once, and not at the end of the step
        self._late: list[int] = []
        self._gradients: dict[int, list[int]] = {}  # address -> bytes that are needed, bytes in all

    def take(self, nbytes: int) -> None:
        self.active += allocated(nbytes)
        self.peak = max(self.peak, self.active)

    def give(self, nbytes: int) -> None:
        self.active -= allocated(nbytes)

    def take_gradient(self, gradient: Tensor) -> None:
        """What is added to one that is there already takes nothing."""
        if gradient.data_ptr() in self._gradients:
            return
        nbytes = gradient.numel() * gradient.element_size()
        self._gradients[gradient.data_ptr()] = [nbytes, nbytes]
        self.take(nbytes)

    def free_of_gradient(self, gradient: int, nbytes: int, *, later: bool) -> None:
        """A part of it; the last one frees the whole. ``later``: at a time that the program does not know."""
        left = self._gradients.get(gradient)
        if left is None:
            return
        left[0] -= nbytes
        if left[0] == 0:
            del self._gradients[gradient]
            if later and not self.prompt:
                self._late.append(left[1])
            else:
                self.give(left[1])

    def step_ended(self) -> None:
        for nbytes in self._late:
            self.give(nbytes)
        self._late.clear()


def allocated(nbytes: int) -> int:
    """What torch's allocator makes of it."""
    return -(-nbytes // 512) * 512


class FakeDevice:
    """superoffload.links.cuda.device.Device over the fake."""

    ordinal = 0
    torch_device = torch.device("cpu")

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.streams: list[int] = []
        self.ahead: list[int] = []  # of these, the ones whose kernels go first
        self.reusing = False  # memory of gradients is written again without regard to release()
        self.released: set[int] = set()  # addresses of gradients that release() was ever called with
        self._reader: dict[int, int] = {}  # of those that are not free yet, the stream that still reads it
        self.allocates_on: int | None = None  # gradients, for this stream; None: for the one they arrive on
        self.kept: list[Tensor] = []
        fake.has(self)
        self.capturing = False
        self.refused = 0  # so many allocations from now on fail
        self.free = 1 << 30
        self.capacity: int | None = None  # of its memory; then it is free what was not counted at the peak
        self.memory = Memory()
        self.over = False  # nothing uses its memory any more, and nothing waits for its streams

    def current_stream(self) -> int:
        return self.fake.current

    def is_capturing(self) -> bool:
        return self.capturing

    def make_stream(self, *, ahead: bool = False) -> int:
        self.streams.append(self.fake.make_stream())
        if ahead:
            self.ahead.append(self.streams[-1])
        return self.streams[-1]

    def empty(self, nbytes: int) -> Tensor:
        if self.refused:
            self.refused -= 1
            raise torch.OutOfMemoryError("CUDA out of memory, as a test has asked for")
        memory = torch.full((nbytes,), _GARBAGE, dtype=torch.uint8)
        self.comes(memory)
        self.memory.take(nbytes)
        same = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())  # no view, which would keep it
        weakref.finalize(memory, self._freed, same, self.fake.current).atexit = False
        return memory

    def _freed(self, memory: Tensor, stream: int) -> None:
        """Its next owner goes on with it in the order of the stream that it was allocated on."""
        self.memory.give(memory.numel())
        self.overwrite(memory, self._reader.pop(memory.data_ptr(), stream))

    def free_bytes(self) -> int:
        return self.free if self.capacity is None else self.capacity - self.memory.peak

    def reuses_unasked(self) -> bool:
        return self.reusing

    def comes(self, memory: Tensor) -> None:
        """Nothing reads what was at its address before."""
        self._reader.pop(memory.data_ptr(), None)

    def release(self, gradients: Sequence[Tensor], stream: int) -> None:
        for gradient in gradients:
            self.released.add(gradient.data_ptr())
            self._reader[gradient.data_ptr()] = stream

    def gradient_freed(self, gradient: int, part: Tensor, stream: int) -> None:
        """Its next owner comes at once, on the stream that it was allocated for, where no other reads it."""
        owner = self.allocates_on or stream
        reader = self._reader.pop(gradient, owner)
        self.memory.free_of_gradient(gradient, part.numel() * part.element_size(), later=reader != owner)
        self.overwrite(part, reader)

    def overwrite(self, tensor: Tensor, stream: int) -> None:
        """As the next owner of the memory does, who then finds what he has written. Its real owner lets go of it now,
        so we keep it for that long. Once the device is over, nothing keeps it until the stream has come so far: the
        garbage collector may free a gradient in a later test, whose memory would be overwritten."""
        if self.over:
            return
        self.kept.append(tensor)
        garbage = garbage_like(tensor)
        self.fake.write(stream, tensor, garbage)
        self.fake.read(stream, tensor, garbage)


def garbage_like(tensor: Tensor) -> Tensor:
    return torch.full((tensor.numel() * tensor.element_size(),), _GARBAGE, dtype=torch.uint8)


class OrderedSums:
    """What a program does to tensors after their sums were taken is behind that, as on a device's stream."""

    def __init__(self, taken_by: BitSums, fake: Fake) -> None:
        self._taken_by = taken_by
        self._fake = fake
        self.every_step, self.in_stream_order = taken_by.every_step, taken_by.in_stream_order

    def of(self, flats: Sequence[Tensor]) -> list[Sums]:
        found = self._taken_by.of(flats)
        self._fake.synchronize()
        return found

    def changed(self, before: Sequence[Sums], flats: Sequence[Tensor]) -> list[bool]:
        return self._taken_by.changed(before, flats)


class LateLink(CudaLink):
    """Gradients appear late, and parameters are read late, on the current stream: as a GPU runs behind the program."""

    def __init__(self, device: FakeDevice, options: CudaOptions) -> None:
        super().__init__(device, options)
        self.fake_device = device
        self.bit_sums = OrderedSums(self.bit_sums, device.fake)

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        fake, device = self.fake_device.fake, self.fake_device
        kept = not self.frees_gradients or any(piece.shard.keeps_gradient for piece in bucket.pieces)
        if kept:
            fake.synchronize()  # we read them here, perhaps for the second time, as no program would
        parts = []  # a gradient may span buckets
        for piece, grad in zip(bucket.pieces, grads, strict=True):
            if grad is not None:
                part = grad.detach().view(-1)[piece.start : piece.start + piece.numel]
                parts.append((grad, part, not self.frees_gradients or piece.shard.keeps_gradient))
        late = []
        for grad, part, theirs in parts:
            late.append((part, part.clone(), theirs))
            device.comes(grad)
            device.kept.append(grad)  # the allocator of a device would know what is still to be written there
            ctypes.memset(part.data_ptr(), _GARBAGE, part.numel() * part.element_size())
            fake.write(fake.current, *late[-1][:2])
        # What the link is given goes when the link lets go of it: at once, or behind a later bucket.
        given = [None if grad is None else grad.detach() for grad in grads]
        owners = [grad for grad in given if grad is not None]
        for owner, (grad, part, theirs) in zip(owners, parts, strict=True):
            if not theirs:
                gone = weakref.finalize(owner, device.gradient_freed, grad.data_ptr(), part, fake.current)
                gone.atexit = False
        try:
            ticket = super().pack(bucket, given)
        finally:
            del given, owners[:]
        for part, values, theirs in late:
            if theirs:  # whose owner may do with them what he likes
                fake.write(fake.current, part, garbage_like(part))
                fake.write(fake.current, part, values)
        return ticket

    def step_ended(self, *, whole: bool) -> None:
        super().step_ended(whole=whole)
        if whole:
            self.fake_device.memory.step_ended()

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        fake = self.fake_device.fake
        for piece, present in zip(bucket.pieces, bucket.present, strict=True):
            if present:
                # Of this bucket only: those of the same parameter that were delivered before may have changed theirs.
                fake.read(fake.current, piece.shard.target()[piece.start : piece.start + piece.numel])
        return super().deliver(bucket, after)

    @property
    def roles(self) -> dict[str, int]:
        """The streams by name."""
        pack, down, up = self.fake_device.streams[:3]
        return {"current": self.fake_device.fake.current, "pack": pack, "down": down, "up": up}


class InOrderLink(LateLink):
    """A program reads parameters only once its stream has come so far, as a GPU's own reads do."""

    def make_visible(self, bucket: Bucket) -> None:
        super().make_visible(bucket)
        self.fake_device.fake.synchronize()


@contextmanager
def on_host() -> Iterator[None]:
    """Likewise, the link that copies gradients during backward, also with ``speculation="never"``."""
    with mock.patch("superoffload.optimizer.adamw_parts.link_for", lambda params, **_: HostLink()):
        yield


@contextmanager
def on_fake_device(fake: Fake, kind: type[LateLink] = LateLink, **options: Any) -> Iterator[list[LateLink]]:
    """AdamW made inside gets a CudaLink; yields the links."""
    links: list[LateLink] = []

    def link_for(params: Sequence[Tensor], *, keep_grads: bool | None, in_place: bool) -> LateLink:
        given = CudaOptions(keep_grads=bool(keep_grads), image=IMAGE, timeout_seconds=60.0, library=fake.library)
        links.append(kind(FakeDevice(fake), replace(given, **options)))
        return links[-1]

    move_state = vars(layout)["move_state"]

    def move(shard: Shard, device: torch.device | None) -> None:
        fake.synchronize()  # Python reads a real device's memory behind the current stream
        move_state(shard, device)

    with (
        mock.patch("superoffload.optimizer.adamw_parts.link_for", link_for),
        mock.patch.object(layout, "move_state", move),
    ):
        try:
            yield links
        finally:
            for link in links:
                link.close()
                link.fake_device.over = True
                for stream in link.roles.values():
                    fake.synchronize(stream)  # what a broken device has left, before memory goes that it is about
