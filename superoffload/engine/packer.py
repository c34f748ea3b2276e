"""From gradients to packed gradients: packing, what was packed, and sums that are made where it was packed."""

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
    """Packs the gradients of buckets, and knows what was packed."""

    def __init__(self, link: Link, layout: Layout, inbox: Inbox, executor: Executor, listener: Listener) -> None:
        self.norm = PartialNorm(inbox.is_whole)
        self._link = link
        self._layout = layout
        self._inbox = inbox
        self._executor = executor
        self._listener = listener

    def pack(self, bucket: Bucket) -> None:
        """Hands what has arrived of ``bucket`` to the link."""
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
        """Gradients of which every part was packed: nothing reads them again, so their memory may go."""
        for piece in bucket.stepped_pieces():
            shard = piece.shard
            filling = (other.state is BucketState.FILLING for other in self._layout.buckets_of(shard))
            if self._inbox.gradient_of(shard) is not None and not any(filling):
                self._inbox.let_go(shard)
                self._listener.packed(shard)

    # ---- on its way ------------------------------------------------------------------------------

    def await_earlier_part(self, bucket: Bucket) -> None:
        """Before a bucket is packed again: where gradients were let go, their part of the packed one must have come.

        DeviceError: it was lost, and cannot be had again.
        """
        if bucket.arrival is None or not self._inbox.counts_on(bucket):
            return
        with self._executor.caller_at_work():
            _await(bucket.arrival)

    def await_arrivals(self) -> None:
        """Waits for all packed gradients, and with them the sums. One that is lost is a failure of the executor."""
        for bucket in self._layout.buckets:
            if bucket.state is BucketState.READY:
                self._executor.wait(bucket)
            elif bucket.state is BucketState.SPECULATED and bucket.arrival is not None:
                try:
                    _await(bucket.arrival)
                except DeviceError as error:
                    self._executor.fail(error)

    def lost(self) -> str | None:
        """Why a packed gradient that the step counts on never reached host memory, where that is so."""
        for bucket in self._layout.buckets:
            if bucket.arrival is not None and bucket.arrival.error and self._inbox.counts_on(bucket):
                return bucket.arrival.error
        return None

    # ---- what was packed --------------------------------------------------------------------------------------

    def gradient_is(self, shard: Shard, gradient: Tensor) -> bool:
        """Whether the gradient that arrived has the bits of ``gradient``."""
        arrived = self._inbox.gradient_of(shard)
        for bucket, place in self._layout.places_of(shard):
            piece = bucket.pieces[place]
            theirs = gradient[piece.start : piece.start + piece.numel]
            if arrived is None or bucket.state is not BucketState.FILLING:
                # What arrived may have been overwritten since it was packed, or is gone.
                if bucket.arrival is not None:
                    wait_until_ended(bucket.arrival)  # if it was lost, decide() says so
                ours = _packed(bucket, piece)
            else:
                ours = arrived.detach().view(-1)[piece.start : piece.start + piece.numel]
                if ours.data_ptr() == theirs.data_ptr() and ours.dtype == theirs.dtype:
                    continue  # it is what will be packed
            # Packed in host memory; in fp32, which holds every other type, where that of its bucket is.
            if not same_bits(ours.to("cpu"), theirs.to("cpu", ours.dtype)):
                return False
        return True

    def packed_sums(self, shard: Shard) -> list[tuple[Piece, Sums]] | None:
        """Of the bits of its gradient, piece by piece; None where there are none, or some is still to be packed."""
        found = []
        again = self._inbox.gradient_of(shard) is not None  # else only what was packed is left of it
        for bucket, place in self._layout.places_of(shard):
            sums = bucket.bit_sums.get(bucket.pieces[place])
            if sums is None or (again and bucket.state is BucketState.FILLING):
                return None
            found.append((bucket.pieces[place], sums))
        return found

    def copy_packed(self, shard: Shard, into: Tensor) -> None:
        """What was packed of ``shard`` last, this step or before, as a flat tensor of its gradient's type."""
        with self._executor.caller_at_work():
            for bucket, place in self._layout.places_of(shard):
                piece = bucket.pieces[place]
                assert bucket.packed is not None
                _await(bucket.packed)
                into[piece.start : piece.start + piece.numel].copy_(_packed(bucket, piece))
            if into.is_cuda:  # before anything is packed over it
                torch.cuda.current_stream(into.device).synchronize()

    # ---- sums of several backward passes, without memory for them where gradients are made -----------------------

    def add(self, places: Sequence[tuple[Bucket, int]], addend: Tensor) -> None:
        """Adds a flat tensor in host memory to what is packed at these places of a shard. Nothing runs on them."""
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
                self.norm.expect(bucket, bucket.arrival)  # to be looked at again
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
