"""Links move gradients down and parameters up. Defines their protocol and the host link (parameters on the CPU)."""

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

_LARGE = 64 << 10  # above this many bytes torch copies a piece with several threads


@dataclass(frozen=True)
class PackTicket:
    """Describes a packed gradient on its way; the shards' block sums are valid once ``completion`` is done.

    ``bit_sums``: sums of the packed bits, for the pieces whose shard asks for them, if the link has a kernel for it;
    the gradients of such pieces are kept.
    """

    bucket: Bucket
    completion: _native.Completion
    bit_sums: Mapping[Piece, Sums] = field(default_factory=dict)


class Link(Protocol):
    """Serves one kind of device; owns streams, staging and the shadow."""

    bytes_down: int
    bytes_up: int
    frees_gradients: bool  # no gradient is read after pack() has returned, so its owner may free it
    asynchronous: bool  # deliver() returns before ``after`` is done, and the link reads the shadow later
    bit_sums: BitSums
    sums_what_it_packs: bool  # its PackTickets have the ``bit_sums`` of the packed gradients

    @property
    def bytes_up_early(self) -> int:
        """Counts those of ``bytes_up`` that travelled before the verdict."""

    @property
    def pinned_bytes(self) -> int:
        """Counts the bytes of host memory that are pinned now."""

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        """Reserves memory before the buckets are attached. ``anew``: they replace all attached ones, which are idle."""

    def attach(self, bucket: Bucket) -> None:
        """Allocates the bucket's packed gradient and shadow (``bucket.padded`` elements each)."""

    def check_stream(self) -> None:
        """Raises DeviceError if the calling thread's stream cannot take work; called before anything is enqueued."""

    def read_on(self, stream: int) -> None:
        """Names a further stream that reads parameters; ``make_visible`` makes it wait like the current one."""

    def received(self, bucket: Bucket) -> None:
        """Notes that a gradient for ``bucket`` is final behind what the calling thread has enqueued; its pack() may be
        called from another stream."""

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """Packs one contiguous gradient per piece of the bucket (None: no gradient this step) with its block sums.

        When it returns the gradients may be changed or freed.
        """

    def came_down(self, nbytes: int) -> None:
        """Counts gradients that reached host memory in another way than by ``pack()``."""

    def arrived(self, ticket: PackTicket) -> _native.Completion:
        """Returns a completion: the packed gradient is in host memory. Worker threads wait on it without the GIL."""

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        """Copies the shadow to the device once ``after``, a speculated step, is done, where no reader sees it.
        ``deliver()`` then need not copy it again. Links do so if they can and have the memory."""

    def unstage(self, bucket: Bucket) -> None:
        """Discards staged parameters, since the verdict wants other ones. When it returns, nothing reads the shadow for
        them any more."""

    def step_ended(self, *, whole: bool) -> None:
        """Ends a step after its last ``deliver()``. Not ``whole``: there was no verdict, or no gradient is left for
        now."""

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        """Copies the shadow of the bucket's present pieces to the published parameters, once ``after`` is done.

        The copy is made even if ``after`` failed, since an operation after the verdict is completed. The result is done
        once the copy was made, or once it is enqueued where streams order it.
        """

    def has_room(self, nbytes: int) -> bool:
        """Tells whether so much memory stays unused throughout a step on the device that has the gradients."""

    def make_visible(self, bucket: Bucket) -> None:
        """Makes the training thread's stream wait for a delivery, so that its later work reads the new parameters."""

    def close(self) -> None:
        """Ends all work. The buckets' memory stays readable. Idempotent."""


class SynchronousLink:
    """Implements what links share whose copies are done when the call returns; the shadow is in host memory."""

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
        """Reserves nothing, since every bucket has its own memory."""
        if anew:
            self._pieces.clear()

    def _pieces_of(self, bucket: Bucket) -> _native.HostPieces:
        """Describes where the bucket's pieces are packed, and what is published of them."""
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
        self.bytes_down += size * sum(piece.numel for piece in bucket.stepped_pieces())
        return PackTicket(bucket, _native.Completion.already_done())

    def check_stream(self) -> None:
        """Checks nothing: there are no streams."""

    def read_on(self, stream: int) -> None:
        """Does nothing: there are no streams."""

    def received(self, bucket: Bucket) -> None:
        """Does nothing: the gradient is in host memory."""

    def came_down(self, nbytes: int) -> None:
        self.bytes_down += nbytes

    def arrived(self, ticket: PackTicket) -> _native.Completion:
        return ticket.completion

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        """Does nothing: ``deliver()`` makes the copy."""

    def unstage(self, bucket: Bucket) -> None:
        """Does nothing: no bucket is staged."""

    def step_ended(self, *, whole: bool) -> None:
        """Frees nothing, since no memory was kept for the step."""

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
            if address and shard.parameter is not None:  # for so little, torch takes longer to start than to copy
                addresses[i] = address + size * piece.start
                written.append(shard.parameter)
            else:
                targets.append(shard.target()[piece.start : piece.start + piece.numel])
                sources.append(bucket.shadow[piece.offset : piece.offset + piece.numel])
        if written:
            self._pieces_of(bucket).publish(addresses)
            torch.autograd.graph.increment_version(written)
        if targets:
            # In place, so the parameters' version counters rise. A copy to a device, also from pinned memory, has ended
            # when this returns, so the shadow may be written again.
            torch._foreach_copy_(targets, sources)
        return _native.Completion.already_done()

    def has_room(self, nbytes: int) -> bool:
        """Says yes: gradients keep their memory anyway."""
        return True

    def make_visible(self, bucket: Bucket) -> None:
        """Does nothing: the copy made the parameters visible."""

    def close(self) -> None:
        """Ends nothing: no work is running."""


class HostLink(SynchronousLink):
    """Serves gradients and parameters in host memory. Packing copies: edits of ``p.grad`` cannot reach the journal."""

    def attach(self, bucket: Bucket) -> None:
        bucket.use_memory(
            gradient=host_empty(bucket.padded, bucket.gradient_dtype, f"the packed gradient of {bucket.name}"),
            shadow=host_empty(bucket.padded, bucket.published_dtype, f"the shadow of {bucket.name}"),
        )

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        return self.pack_pieces(bucket, grads)


def wait_until_ended(operation: _native.Completion) -> None:
    """Waits for an operation and ignores its failure: the engine waits for it too and handles the failure."""
    with suppress(RuntimeError):
        operation.wait()
