"""Gradients are packed here. Packed gradients can be compared, copied and added to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES, Bucket, BucketState, Piece, Shard
from superoffload.engine.executor import Executor
from superoffload.engine.inbox import Inbox
from superoffload.engine.layout import Layout
from superoffload.engine.listener import Listener
from superoffload.engine.partial_norm import PartialNorm
from superoffload.errors import DeviceError
from superoffload.host.bits import Sums, same_bits
from superoffload.links.base import Link, wait_until_ended


class Packer:
    """Packs the gradients of buckets and reads their packed gradients."""

    def __init__(self, link: Link, layout: Layout, inbox: Inbox, executor: Executor, listener: Listener) -> None:
        self.norm = PartialNorm(inbox.is_whole)
        self._link = link
        self._layout = layout
        self._inbox = inbox
        self._executor = executor
        self._listener = listener

    def pack(self, bucket: Bucket) -> None:
        """Has the link pack the gradients of ``bucket`` that have arrived."""
        grads = self._inbox.gradients_of(bucket)
        bucket.expects(more=not self._inbox.is_whole(bucket))
        with self._executor.caller_at_work():
            ticket = self._link.pack(bucket, grads)
        arrival = self._link.arrived(ticket)
        bucket.is_packed(arrival, ticket.bit_sums)
        self._inbox.is_packed(bucket)
        self.norm.expect(bucket, arrival)
        self._executor.stopwatch.packed(arrival)
        if self._link.frees_gradients:
            self._let_go_of(bucket)

    def _let_go_of(self, bucket: Bucket) -> None:
        """Drops the gradients of which every part was packed: nothing reads them again."""
        for piece in bucket.stepped_pieces():
            shard = piece.shard
            filling = (other.state is BucketState.FILLING for other in self._layout.buckets_of(shard))
            if self._inbox.gradient_of(shard) is not None and not any(filling):
                self._inbox.let_go(shard)
                self._listener.packed(shard)

    # ---- on its way ------------------------------------------------------------------------------

    def await_earlier_part(self, bucket: Bucket) -> None:
        """Waits, before a bucket is packed again, until a packed gradient that the step needs is in host memory.

        Raises DeviceError where it was lost.
        """
        if bucket.arrival is None or not self._inbox.counts_on(bucket):
            return
        with self._executor.caller_at_work():
            _await(bucket.arrival)

    def await_arrivals(self) -> None:
        """Waits for all packed gradients and their sums; the executor keeps a failure for one that is lost."""
        for bucket in self._layout.buckets:
            if bucket.state is BucketState.READY:
                self._executor.wait(bucket)
            elif bucket.state is BucketState.SPECULATED and bucket.arrival is not None:
                try:
                    _await(bucket.arrival)
                except DeviceError as error:
                    self._executor.fail(error)

    def lost(self) -> str | None:
        """Returns why a packed gradient that the step needs never reached host memory; None if none was lost."""
        for bucket in self._layout.buckets:
            if bucket.arrival is not None and bucket.arrival.error and self._inbox.counts_on(bucket):
                return bucket.arrival.error
        return None

    # ---- packed gradients -------------------------------------------------------------------------------------

    def gradient_is(self, shard: Shard, gradient: Tensor) -> bool:
        """Returns whether the gradient that arrived has the bits of ``gradient``."""
        arrived = self._inbox.gradient_of(shard)
        for bucket, place in self._layout.places_of(shard):
            piece = bucket.pieces[place]
            theirs = gradient[piece.start : piece.start + piece.numel]
            if arrived is None or bucket.state is not BucketState.FILLING:
                # The gradient that arrived may be overwritten or gone.
                if bucket.arrival is not None:
                    wait_until_ended(bucket.arrival)  # decide() raises if it was lost
                ours = _packed(bucket, piece)
            else:
                ours = arrived.detach().view(-1)[piece.start : piece.start + piece.numel]
                if ours.data_ptr() == theirs.data_ptr() and ours.dtype == theirs.dtype:
                    continue  # the same memory
            # A packed gradient is in host memory and in its bucket's dtype; fp32 holds every other one exactly.
            if not same_bits(ours.to("cpu"), theirs.to("cpu", ours.dtype)):
                return False
        return True

    def packed_sums(self, shard: Shard) -> list[tuple[Piece, Sums]] | None:
        """Returns the sums of the packed bits, piece by piece; None if any piece has none or must be packed again."""
        found = []
        again = self._inbox.gradient_of(shard) is not None  # else the packed gradient is the only copy
        for bucket, place in self._layout.places_of(shard):
            sums = bucket.bit_sums.get(bucket.pieces[place])
            if sums is None or (again and bucket.state is BucketState.FILLING):
                return None
            found.append((bucket.pieces[place], sums))
        return found

    def copy_packed(self, shard: Shard, into: Tensor) -> None:
        """Copies the gradient of ``shard`` that was packed last into a flat tensor."""
        with self._executor.caller_at_work():
            for bucket, place in self._layout.places_of(shard):
                piece = bucket.pieces[place]
                assert bucket.packed is not None
                _await(bucket.packed)
                into[piece.start : piece.start + piece.numel].copy_(_packed(bucket, piece))
            if into.is_cuda:  # the packed gradient may be overwritten afterwards
                torch.cuda.current_stream(into.device).synchronize()

    # ---- sums of several backward passes, in host memory ---------------------------------------------------------

    def add(self, places: Sequence[tuple[Bucket, int]], addend: Tensor) -> None:
        """Adds a flat tensor in host memory to a shard's packed gradient at these places; nothing may run on them."""
        for bucket, place in places:
            piece = bucket.pieces[place]
            packed = _packed(bucket, piece)
            total = packed + addend[piece.start : piece.start + piece.numel]
            _native.pack(
                gradient=total.data_ptr(),
                packed=packed.data_ptr(),
                type=ELEMENT_TYPES[bucket.gradient_dtype],
                numel=piece.numel,
                block_sums=piece.sums_address,
            )
            self.norm.forget(bucket)
            if bucket.state is BucketState.READY and bucket.arrival is not None:
                self.norm.expect(bucket, bucket.arrival)  # its squares have changed
        self._link.came_down(addend.nbytes)

    def end_step(self) -> None:
        self.norm.clear()


def _packed(bucket: Bucket, piece: Piece) -> Tensor:
    return bucket.gradient[piece.offset : piece.offset + piece.numel]


def _await(arrival: _native.Completion) -> None:
    try:
        arrival.wait()
    except RuntimeError as error:
        raise DeviceError(str(error)) from error
