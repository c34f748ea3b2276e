"""Serves parameters on the CPU: by copies in host memory, or in place, where nothing is stepped early or late."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES, Bucket
from superoffload.host.bits import BitSums, SumsInMemory
from superoffload.host.memory import host_empty
from superoffload.links.base import PackTicket, wait_until_ended

_LARGE = 64 << 10  # bytes of a piece that torch copies with several threads


class SynchronousLink:
    """Implements what links share whose copies are done when the call returns; the shadow is in host memory."""

    asynchronous = False
    frees_gradients = False
    in_place = False
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
        here = zip(bucket.pieces, bucket.present, strict=True)
        self.bytes_down += size * sum([piece.numel for piece, present in here if present])
        return PackTicket(_native.Completion.already_done())

    def check_stream(self) -> None:
        """Checks nothing: there are no streams."""

    def read_on(self, stream: int) -> None:
        """Does nothing: there are no streams."""

    def received(self, bucket: Bucket) -> None:
        """Does nothing: the gradient is in host memory."""

    def came_down(self, nbytes: int) -> None:
        self.bytes_down += nbytes

    def stage(self, bucket: Bucket, after: _native.Completion) -> None:
        """Does nothing: ``deliver()`` makes the copy."""

    def has_staged(self, bucket: Bucket) -> bool:
        return False

    def unstage(self, bucket: Bucket) -> None:
        """Does nothing: no bucket is staged."""

    def step_ended(self, *, whole: bool) -> None:
        """Frees nothing, since no memory was kept for the step."""

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        wait_until_ended(after)
        if bucket.published is not None:  # the step wrote the parameters
            here = zip(bucket.published, bucket.present, strict=True)
            torch.autograd.graph.increment_version([target for target, present in here if present])
            return _native.Completion.already_done()
        size = bucket.published_dtype.itemsize
        addresses, written = [0] * len(bucket.pieces), []
        targets, sources = [], []
        for i, (piece, present) in enumerate(zip(bucket.pieces, bucket.present, strict=True)):
            if not present:
                continue
            shard, nbytes = piece.shard, size * piece.numel
            address = shard.address if nbytes < _LARGE else 0
            if address and shard.parameter is not None:  # for so little, torch takes longer to start than to copy
                addresses[i] = address + size * piece.start
                written.append(shard.parameter)
            else:
                targets.append(piece.of(shard.target()))
                sources.append(bucket.shadow[piece.offset : piece.offset + piece.numel])
        self.bytes_up += size * sum([piece.numel for piece in bucket.stepped_pieces()])
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

    def await_copies(self) -> None:
        """Does nothing: all copies were made when the call returned."""

    def give_back(self) -> None:
        """Forgets all buckets, which have the memory."""
        self.prepare([], anew=True)

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


class InPlaceLink(SynchronousLink):
    """Has gradients read, and parameters written, where they are.

    That is right only where gradients arrive within ``step()``: nothing can change them before the step has ended, and
    no reader can meet a parameter too early. Split masters have a shadow all the same: it is their upper half, which a
    write to the parameter must not reach.
    """

    in_place = True

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Bucket] = []  # whose gradients and parameters are in use
        self._buckets: list[Bucket] = []
        self._state = AddressRanges(())  # masters and moments
        self._targets: dict[Bucket, list[Tensor]] = {}  # memory of parameters; it may move between steps
        self._written = AddressRanges(())  # that memory

    def prepare(self, buckets: Sequence[Bucket], *, anew: bool) -> None:
        super().prepare(buckets, anew=anew)
        self._buckets = [*([] if anew else self._buckets), *buckets]
        self._targets.clear()
        shards = {piece.shard for bucket in self._buckets for piece in bucket.pieces}
        self._state = AddressRanges(
            tensor for shard in shards for tensor in (shard.master, shard.exp_avg, shard.exp_avg_sq)
        )

    def attach(self, bucket: Bucket) -> None:
        if bucket.splits_masters:
            bucket.use_memory(shadow=host_empty(bucket.padded, bucket.published_dtype, f"the shadow of {bucket.name}"))

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """Sums the squares of the gradients; they must stay as they are until the bucket is delivered."""
        if not self._targets:
            self._targets = {each: [piece.of(piece.shard.target()) for piece in each.pieces] for each in self._buckets}
            self._written = AddressRanges(target for targets in self._targets.values() for target in targets)
        gradients = [
            None if grad is None else self._unwritten(piece.of(grad.detach().view(-1)))
            for piece, grad in zip(bucket.pieces, grads, strict=True)
        ]
        bucket.use_memory(gradients=gradients, published=None if bucket.splits_masters else self._targets[bucket])
        self._held.append(bucket)
        self._pieces_of(bucket).pack([0 if gradient is None else gradient.data_ptr() for gradient in gradients])
        return PackTicket(_native.Completion.already_done())

    def _unwritten(self, gradient: Tensor) -> Tensor:
        """Copies a gradient in memory that the step writes: a user may set a parameter as the gradient of another."""
        is_written = self._written.overlap(gradient) or self._state.overlap(gradient)
        return gradient.clone() if is_written else gradient

    def step_ended(self, *, whole: bool) -> None:
        """Lets go of gradients and parameters."""
        for bucket in self._held:
            bucket.let_go()
        self._held.clear()
        self._targets.clear()


class AddressRanges:
    """Holds the addresses of contiguous tensors, as disjoint ranges in their order."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def overlap(self, tensor: Tensor) -> bool:
        """Returns whether a contiguous tensor has memory in any of the ranges."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        before_end = bisect_left(self._begins, end)  # of the ranges, those that begin before the tensor ends
        return before_end > 0 and self._ends[before_end - 1] > begin
