"""Keeps device memory that freed gradients have left, in blocks where new parameters wait for the verdict.

A bucket has its block for one step. It is packed into the block. Once that gradient is in host memory, its new
parameters may come up into the same block, and a commit is one kernel on the device. For gradients of such buckets the
order of streams replaces ``record_stream``, so the device memory needed does not depend on the program's lead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Bucket, Shard
from superoffload.host.memory import is_out_of_memory
from superoffload.links.cuda.device import Device

ALLOCATED = 512  # bytes; torch's allocator hands out multiples of it


@dataclass(frozen=True)
class _Block:
    native: _native.DeviceBucket
    memory: Tensor
    stream: int  # it was allocated on this stream, which uses it next


@dataclass(frozen=True)
class _Lingering:
    """Keeps gradients of the bucket that was packed last, since the pack kernel may still read them."""

    native: _native.DeviceBucket
    stream: int  # they were packed from this stream; memory of other streams is recorded on it
    gradients: list[Tensor]


class Blocks:
    """Gives blocks to the buckets of a ``CudaLink``."""

    def __init__(self, device: Device, pipeline: _native.CudaPipeline, pack_stream: int) -> None:
        self._device = device
        self._pipeline = pipeline
        self._pack_stream = pack_stream
        self._early: set[Bucket] = set()  # buckets that may have a block
        self._held: dict[Bucket, _Block] = {}
        self._used = 0  # bytes of the blocks in ``_held``
        self._lingering: _Lingering | None = None
        self._peak_is_known = False  # set when a whole step without blocks has ended
        self._room: int | None = None  # bytes for all blocks together; None: not measured yet
        self._measured = False  # in this step

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Chooses the buckets that may have a block, among all attached ones in backward order."""
        self._early = early_buckets(buckets)

    def has(self, bucket: Bucket) -> bool:
        """Returns whether ``bucket`` was packed into a block and still has it."""
        return bucket in self._held

    def take(self, bucket: Bucket, native: _native.DeviceBucket) -> int:
        """Returns the address of the block to pack ``bucket`` into; 0: it has none."""
        if bucket not in self._held and bucket in self._early:
            self._allocate(bucket, native)
        return self._held[bucket].memory.data_ptr() if bucket in self._held else 0

    def _allocate(self, bucket: Bucket, native: _native.DeviceBucket) -> None:
        nbytes = _block_bytes(bucket)
        if self._used + nbytes > self._room_now():
            return
        try:
            memory = self._device.empty(nbytes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._room = 0
            return
        self._held[bucket] = _Block(native, memory, self._device.current_stream())
        self._used += nbytes

    def _room_now(self) -> int:
        """Returns the bytes for blocks: half of what stayed unused at the peak so far, blocks included.

        The other half is for gradients that linger, and for larger steps to come. The first whole step has no blocks.
        """
        if not self._peak_is_known:
            return 0
        if not self._measured:
            self._measured = True
            half = self._device.free_bytes() // 2
            self._room = half if self._room is None else min(self._room, half)
        return self._room or 0

    def linger(self, native: _native.DeviceBucket, stream: int, gradients: list[Tensor]) -> None:
        """Keeps gradients that were packed into a block until the next bucket is packed, or the step ends."""
        self._lingering = _Lingering(native, stream, gradients)

    def free(self) -> None:
        """Frees lingering gradients in the order of their stream, which waits for the pack kernel.

        By the time that the next bucket is packed the kernel has long ended, so backward hardly waits.
        """
        lingering, self._lingering = self._lingering, None
        if lingering is None:
            return
        reader = lingering.stream
        try:
            self._pipeline.hold_back(lingering.native, reader)
        except RuntimeError:  # the next call reports the failure
            reader = self._pack_stream
        self._device.release(lingering.gradients, reader)

    def give_back(self, bucket: Bucket) -> None:
        """Frees a bucket's block behind what is enqueued."""
        block = self._held.get(bucket)
        if block is None:
            return
        try:
            self._pipeline.release(block.native, block.stream)
        except RuntimeError:  # the next call reports it; the next step's end tries again
            return
        del self._held[bucket]
        self._used -= block.memory.numel()

    def step_ended(self, pending: Collection[Bucket], *, whole: bool) -> None:
        """Ends a step. ``pending``: buckets that are on their way from their blocks to the parameters."""
        self.free()
        for bucket in [bucket for bucket in self._held if bucket not in pending]:
            self.give_back(bucket)
        self._peak_is_known |= whole
        self._measured = False

    def clear(self) -> list[Tensor]:
        """Forgets blocks and gradients; returns their memory, which may be freed once the device is idle."""
        blocks = [block.memory for block in self._held.values()]
        gradients = self._lingering.gradients if self._lingering is not None else []
        self._held.clear()
        self._lingering = None
        self._used = 0
        return [*blocks, *gradients]


def early_buckets(buckets: Sequence[Bucket]) -> set[Bucket]:
    """Returns the buckets, of those given in backward order, that may have a block.

    With these, blocks and gradients never take more than all gradients together, since a block is no larger than its
    bucket's gradients. While the gradients linger both exist, and all gradients of open buckets may exist too, so the
    gradients still to come must be as large. The last buckets have none to come; they are stepped after the verdict.
    """
    freed = {piece.shard for bucket in buckets for piece in bucket.pieces if not piece.shard.keeps_gradient}
    total = _gradient_bytes(freed)
    packed: set[Shard] = set()
    packed_bytes = 0
    early: set[Bucket] = set()
    for bucket, behind in zip(buckets, _open_behind(buckets), strict=True):
        own = _shards(bucket)
        packed_bytes += _gradient_bytes((own & freed) - packed)
        packed |= own & freed
        still_open = (set().union(*map(_shards, behind)) & freed) - packed
        needed = packed_bytes + _gradient_bytes(own) + _gradient_bytes(still_open)
        fits = bucket.published_dtype.itemsize <= bucket.gradient_dtype.itemsize
        if needed <= total and own <= freed and fits and not bucket.resident:
            early.add(bucket)
    # A gradient that spans buckets stays until its last bucket is packed, and longer if that has no block.
    while True:
        late = set().union(*(_shards(bucket) for bucket in buckets if bucket not in early))
        mixed = {bucket for bucket in early if not late.isdisjoint(_shards(bucket))}
        if not mixed:
            return early
        early -= mixed


def _open_behind(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Lists for each bucket those whose gradients may arrive before the next one is complete: one of every kind."""
    following: dict[object, Bucket] = {}
    found = []
    for bucket in reversed(buckets):
        found.append(list(following.values()))
        following[bucket.group, bucket.gradient_dtype, bucket.published_dtype, bucket.resident] = bucket
    return found[::-1]


def _shards(bucket: Bucket) -> set[Shard]:
    return {piece.shard for piece in bucket.pieces}


def _block_bytes(bucket: Bucket) -> int:
    return _allocated(bucket.padded * bucket.gradient_dtype.itemsize)


def _gradient_bytes(shards: Iterable[Shard]) -> int:
    return sum(_allocated(shard.numel * shard.gradient_dtype.itemsize) for shard in shards)


def _allocated(nbytes: int) -> int:
    return -(-nbytes // ALLOCATED) * ALLOCATED
