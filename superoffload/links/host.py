"""What moves gradients down and parameters up. This file: the protocol, and the host link (parameters on the CPU)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES, Bucket, Piece
from superoffload.host.bits import BitSums, Sums, SumsInMemory
from superoffload.host.memory import host_empty

_LARGE = 64 << 10  # bytes of a piece that torch copies with several threads


@dataclass(frozen=True)
class PackTicket:
    """A packed gradient on its way.

    ``completion`` is done once it is in host memory and the shards' block sums are valid; worker threads wait on it
    without the GIL.

    ``bit_sums``: of the bits that were packed, for the pieces whose shard asks for them and whose link has a kernel for
    it; such pieces' gradients are still there.
    """

    bucket: Bucket
    completion: _native.Completion
    bit_sums: Mapping[Piece, Sums] = field(default_factory=dict)


class Link(Protocol):
    """One per device kind; owns streams, staging and the shadow."""

    bytes_down: int
    bytes_up: int
    frees_gradients: bool  # nobody reads a gradient again once pack() has returned, so its owner may let it go
    in_streams: bool  # gradients come in the order of streams, which check_stream() and received() look at
    asynchronous: bool  # deliver() returns before ``after`` is done, and reads the shadow by itself once it is
    bit_sums: BitSums
    sums_what_it_packs: bool  # a PackTicket has the ``bit_sums`` of what was packed

    @property
    def bytes_up_early(self) -> int:
        """Of ``bytes_up``, those that travelled before the verdict."""

    @property
    def pinned_bytes(self) -> int:
        """Of host memory, now."""

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        """Before these are attached. ``anew``: instead of all that were attached before, which are idle."""

    def attach(self, bucket: Bucket) -> None:
        """Allocates the bucket's packed gradient and shadow (``bucket.padded`` elements each)."""

    def check_stream(self) -> None:
        """Before anything is enqueued: DeviceError where the calling thread's stream cannot take it."""

    def read_on(self, stream: int) -> None:
        """Parameters are also read on this stream, which ``make_visible`` has wait as the current one."""

    def received(self, bucket: Bucket) -> None:
        """A gradient for ``bucket`` is final behind what the calling thread has enqueued; its pack() may be called
        from another stream."""

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """Packs one contiguous gradient per piece of the bucket (None: no gradient this step) with its block sums.

        When it returns the gradients may be changed or freed.
        """

    def came_down(self, nbytes: int) -> None:
        """Gradients that were brought to host memory in another way than by ``pack()``."""

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        """Copies the shadow to the device once ``after``, a speculated step, is done: no reader sees it there, and
        ``deliver()`` need not copy it again. Links do so where they can and there is memory for it."""

    def unstage(self, bucket: Bucket) -> None:
        """The verdict wants other parameters than those that were staged, if any were. When it returns, nothing reads
        the shadow for them any more."""

    def step_ended(self, *, whole: bool) -> None:
        """What is to be delivered has been given to ``deliver()``. Not ``whole``: there was no verdict, or there is no
        gradient left for now."""

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        """Copies the shadow of the bucket's present pieces to the published parameters, once ``after`` is done.

        ``after`` may have failed: an operation after the verdict is completed even so. What is returned is done once
        the copy was made, or where streams order it: enqueued.
        """

    def has_room(self, nbytes: int) -> bool:
        """Whether so much memory, where gradients are, is in use at no time of a step."""

    def make_visible(self, bucket: Bucket) -> None:
        """On the training thread, once the delivery is done: what it enqueues from here on reads the new parameters."""

    def close(self) -> None:
        """Ends what runs. The buckets' memory stays readable. Idempotent."""


class SynchronousLink:
    """What links have in common that are done with a copy when the call returns; the shadow is in host memory."""

    in_streams = False
    asynchronous = False
    frees_gradients = False
    sums_what_it_packs = False
    pinned_bytes = 0

    def __init__(self) -> None:
        self.bit_sums: BitSums = SumsInMemory()
        self.bytes_down = 0
        self.bytes_up = 0
        self.bytes_up_early = 0
        self._pieces: dict[Bucket, _native.HostPieces] = {}

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        """Every bucket has its own memory."""
        if anew:
            self._pieces.clear()

    def _pieces_of(self, bucket: Bucket) -> _native.HostPieces:
        """Where pieces of the bucket are packed, and what is published of them."""
        if bucket not in self._pieces:
            pieces = self._pieces[bucket] = _native.HostPieces(ELEMENT_TYPES[bucket.gradient_dtype])
            stays = bucket.gradients is not None
            size, width = bucket.gradient_dtype.itemsize, bucket.published_dtype.itemsize
            packed = 0 if stays else bucket.gradient.data_ptr()
            shadow = 0 if bucket.resident else bucket.shadow.data_ptr()
            for piece in bucket.pieces:
                pieces.add(
                    packed=0 if stays else packed + size * piece.offset,
                    numel=piece.numel,
                    block_sums=piece.sums_address,
                    shadow=shadow + width * piece.offset,
                    shadow_bytes=width * piece.numel,
                )
        return self._pieces[bucket]

    def pack_pieces(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """Packs gradients that are in host memory; done when it returns."""
        size = bucket.gradient_dtype.itemsize
        addresses = [
            0 if grad is None else grad.data_ptr() + size * piece.start
            for piece, grad in zip(bucket.pieces, grads, strict=True)
        ]
        self._pieces_of(bucket).pack(addresses)
        here = zip(bucket.pieces, bucket.present, strict=True)
        self.bytes_down += size * sum([piece.numel for piece, present in here if present])
        return PackTicket(bucket, _native.Completion.already_done())

    def check_stream(self) -> None:
        """There are no streams."""

    def read_on(self, stream: int) -> None:
        """Nor here."""

    def received(self, bucket: Bucket) -> None:
        """It is in host memory."""

    def came_down(self, nbytes: int) -> None:
        self.bytes_down += nbytes

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        """The copy is made when the caller waits for it."""

    def unstage(self, bucket: Bucket) -> None:
        """Nothing is staged."""

    def step_ended(self, *, whole: bool) -> None:
        """Nothing was kept for it."""

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        wait_until_ended(after)
        size = bucket.published_dtype.itemsize
        addresses, written = [0] * len(bucket.pieces), []
        targets, sources = [], []
        for i, (piece, present) in enumerate(zip(bucket.pieces, bucket.present, strict=True)):
            if not present:
                continue
            shard, nbytes = piece.shard, size * piece.numel
            self.bytes_up += nbytes
            address = shard.address if nbytes < _LARGE else 0
            if address and shard.parameter is not None:  # torch takes longer to start than to copy so little
                addresses[i] = address + size * piece.start
                written.append(shard.parameter)
            else:
                targets.append(shard.target()[piece.start : piece.start + piece.numel])
                sources.append(bucket.shadow[piece.offset : piece.offset + piece.numel])
        if written:
            self._pieces_of(bucket).publish(addresses)
            torch.autograd.graph.increment_version(written)
        if targets:
            # In place: bumps the parameters' version counters. To a device, also from pinned memory, this waits for the
            # copy, so the shadow may be written again.
            torch._foreach_copy_(targets, sources)
        return _native.Completion.already_done()

    def has_room(self, nbytes: int) -> bool:
        """Gradients stay where they are anyway."""
        return True

    def make_visible(self, bucket: Bucket) -> None:
        """It is since it was copied."""

    def close(self) -> None:
        """Nothing runs."""


class HostLink(SynchronousLink):
    """Gradients and parameters in host memory. Packing copies: later edits of ``p.grad`` cannot reach the journal."""

    def attach(self, bucket: Bucket) -> None:
        bucket.use_memory(
            gradient=host_empty(bucket.padded, bucket.gradient_dtype, f"the packed gradient of {bucket.name}"),
            shadow=host_empty(bucket.padded, bucket.published_dtype, f"the shadow of {bucket.name}"),
        )

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        return self.pack_pieces(bucket, grads)


def wait_until_ended(operation: _native.Completion) -> None:
    """Whether it failed is the core's business, which waits for it too."""
    with suppress(RuntimeError):
        operation.wait()
