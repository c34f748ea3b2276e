"""Sums the bits of tensors on a device by a kernel: one launch for any number of tensors, one to compare them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from superoffload import _native
from superoffload.errors import DeviceError
from superoffload.host.bits import Sums
from superoffload.host.memory import room_on_device
from superoffload.links.cuda.device import Device
from superoffload.links.cuda.pinned import PinnedArena, aligned

_FEWEST = 128  # smallest number of tensors that a table has room for
_MOST_TABLES = 8


@dataclass(frozen=True)
class SumsThere:
    """Locates one tensor's sums; tensors that were summed by the same launch share ``memory``."""

    memory: Tensor
    address: int


class CudaBitSums:
    """Sums bits for a ``CudaLink`` with kernels: 8 bytes on the device for every 2048 bytes of a tensor.

    The sums stay there until the last ``Sums`` of their launch is freed. The tables that a launch reads are kept: as
    many as are in use at a time, which is two in a step unless gradients are brought back.
    """

    every_step = False
    in_stream_order = True

    def __init__(
        self, device: Device, gpu: _native.CudaGpu, pipeline: _native.CudaPipeline, timeout_seconds: float
    ) -> None:
        self._device = device
        self._gpu = gpu
        self._pipeline = pipeline
        self._timeout_seconds = timeout_seconds
        self._tables: list[_native.CudaSumsTable] = []
        self.arenas: list[PinnedArena] = []  # the tables' memory on the host
        self.on_device: list[Tensor] = []  # the tables' memory on the device

    def of(self, flats: Sequence[Tensor]) -> list[Sums]:
        """Takes the sums behind what the calling thread's stream has enqueued; nothing waits for them."""
        if not flats:
            return []
        with _translated():
            sums = self.room(list(map(_sums_of, flats)))
            current = self._device.current_stream()
            self._pipeline.take_sums(self._table(len(flats)), current, _runs(sums, flats))
        return list(sums)

    def changed(self, before: Sequence[Sums], flats: Sequence[Tensor]) -> list[bool]:
        """Compares by the calling thread's stream, and waits for it once."""
        if not flats:
            return []
        with _translated():
            current = self._device.current_stream()
            return self._pipeline.compare_sums(self._table(len(flats)), current, _runs(before, flats))

    def room(self, counts: Sequence[int]) -> list[SumsThere]:
        """Allocates device memory for so many sums each, in one allocation."""
        starts = [0, *accumulate(counts)]
        with room_on_device("noticing edits: sums of bits"):
            memory = self._device.empty(8 * starts[-1])
        base = memory.data_ptr()
        return [SumsThere(memory, base + 8 * start) for start in starts[:-1]]

    def drain(self, timeout_seconds: float) -> bool:
        """Tells whether no launch reads a table any more, so that their memory may be freed."""
        until = time.monotonic() + timeout_seconds
        while not all(table.is_free() for table in self._tables):
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
        return True

    def _table(self, runs: int) -> _native.CudaSumsTable:
        """Returns a table that is not in use; once there are enough of them, waits until one is free."""
        until = time.monotonic() + self._timeout_seconds
        while True:
            fitting = [table for table in self._tables if table.capacity >= runs]
            free = next((table for table in fitting if table.is_free()), None)
            if free is not None:
                return free
            if len(fitting) < _MOST_TABLES:
                return self._make_table(max(_FEWEST, 1 << (runs - 1).bit_length()))
            if time.monotonic() > until:
                raise DeviceError(
                    f"noticing edits: the device has not summed bits within {self._timeout_seconds:g} s; is it hung, "
                    "or shared? A longer time: SUPEROFFLOAD_DEVICE_TIMEOUT=seconds"
                )
            time.sleep(0.0001)

    def _make_table(self, runs: int) -> _native.CudaSumsTable:
        nbytes = _native.CudaSumsTable.bytes(runs)
        with room_on_device("noticing edits: the table of a kernel"):
            there = self._device.empty(aligned(nbytes))
        arena = PinnedArena(self._gpu, aligned(nbytes))
        self.arenas.append(arena)
        self.on_device.append(there)
        here = arena.take(nbytes, torch.uint8)
        self._tables.append(self._pipeline.make_sums_table(here.data_ptr(), there.data_ptr(), runs))
        return self._tables[-1]


def sums_per_block(dtype: torch.dtype) -> int:
    """Returns how many sums the pack kernel makes of each of its blocks of gradients of this type."""
    return dtype.itemsize // 2


def _nbytes(flat: Tensor) -> int:
    return flat.numel() * flat.element_size()


def _sums_of(flat: Tensor) -> int:
    return -(-_nbytes(flat) // _native.SUMMED_BYTES)


def _runs(sums: Sequence[Sums], flats: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    found = []
    for one, flat in zip(sums, flats, strict=True):
        assert isinstance(one, SumsThere), "sums of another link"
        found.append((flat.data_ptr(), _nbytes(flat), one.address))
    return found


@contextmanager
def _translated() -> Iterator[None]:
    """Turns the native side's errors into ours."""
    try:
        yield
    except DeviceError:
        raise
    except RuntimeError as error:
        raise DeviceError(f"noticing edits: {error}") from error
