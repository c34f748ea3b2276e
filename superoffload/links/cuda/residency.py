"""Serves buckets whose state is on the device: packs and, after the verdict, steps them there; only sums come down."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Bucket
from superoffload.errors import DeviceError, TornStep
from superoffload.links.cuda import geometry
from superoffload.links.cuda.device import Device
from superoffload.links.cuda.pinned import aligned


@dataclass(frozen=True)
class _Memory:
    """Holds a bucket's memory on the device as long as the bucket is attached."""

    bucket: _native.DeviceBucket
    table: Tensor  # for the step kernel


class CudaResidency:
    """Serves a ``CudaLink``'s resident buckets. ``attach_native`` makes the native bucket and allocates its sums."""

    def __init__(
        self,
        device: Device,
        pipeline: _native.CudaPipeline,
        attach_native: Callable[[Bucket, int, str], _native.DeviceBucket],
    ) -> None:
        self._device = device
        self._pipeline = pipeline
        self._attach_native = attach_native
        self._memory: dict[Bucket, _Memory] = {}
        self._without_event = False  # a step is running, and no event tells when it ends

    @property
    def device(self) -> torch.device:
        return self._device.torch_device

    def attach(self, bucket: Bucket) -> None:
        nbytes = bucket.padded * bucket.gradient_dtype.itemsize
        table = aligned(nbytes)
        memory = self._device.empty(table + len(bucket.pieces) * geometry.STEP_PIECE.itemsize)
        bucket.use_memory(gradient=memory[:nbytes].view(bucket.gradient_dtype))
        native = self._attach_native(bucket, bucket.gradient.data_ptr(), geometry.step_kernel(bucket))
        self._memory[bucket] = _Memory(native, memory[table:])

    def drain(self, timeout_seconds: float) -> bool:
        """Tells whether no step is under way; if so, frees everything of the buckets so far."""
        until = time.monotonic() + timeout_seconds
        if self._without_event:
            return False
        while not all(self._pipeline.has_stepped(memory.bucket) for memory in self._memory.values()):
            if time.monotonic() > until:
                return False
            time.sleep(0.0005)
        self._memory.clear()
        return True

    def step(self, bucket: Bucket) -> None:
        assert bucket.resident_work is not None
        scalars = bucket.resident_work.scalars
        table = geometry.step_table(bucket, scalars)
        memory = self._memory[bucket]
        present = [piece.shard for piece, frozen in zip(bucket.pieces, scalars, strict=True) if frozen is not None]
        try:
            behind = self._pipeline.step(
                memory.bucket,
                current=self._device.current_stream(),
                table=table.tobytes(),
                count=len(table),
                blocks=geometry.count_blocks(table),
                device_table=memory.table.data_ptr(),
            )
        except RuntimeError as error:
            raise DeviceError(f"{present[0].name}: its step on the device could not be launched: {error}") from error
        if behind:
            self._without_event = True
            raise TornStep(
                f"{present[0].name}: its step on the device was launched, but the device failed behind it: {behind}. "
                "Make a new optimizer and load the last checkpoint"
            )
        torch.autograd.graph.increment_version([shard.target() for shard in present])

    def free_bytes(self) -> int:
        return self._device.free_bytes()
