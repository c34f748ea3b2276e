"""During backward: gradients arrive, complete buckets are packed; some gradients were not final after all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from superoffload.bits import Sums, same_bits
from superoffload.bucket import Bucket, BucketState, GroupHyper, Piece, Shard
from superoffload.errors import DeviceError, StateError
from superoffload.link import Link, wait_until_ended
from superoffload.pipeline.options import CoreOptions
from superoffload.pipeline.speculating import Speculating


class Arriving(Speculating):
    """What has arrived in this step, and where it is."""

    def __init__(self, link: Link, options: CoreOptions, hyper_of: Callable[[int], GroupHyper]) -> None:
        super().__init__(link, options, hyper_of)
        self._incoming: dict[int, Tensor | None] = {}  # None: packed, and let go

    def has_gradient(self, shard: Shard) -> bool:
        """Whether a gradient of ``shard`` has arrived in this step."""
        return shard.index in self._incoming

    @property
    def is_filling(self) -> bool:
        """Whether any gradient has arrived in this step."""
        return bool(self._incoming)

    def widen(self, shards: Iterable[Shard]) -> None:
        """Lays buckets out anew, with the gradients of these shards in fp32; not where some of this step are packed."""
        narrow = [shard for shard in shards if shard.gradient_dtype != torch.float32]
        if not narrow:
            return
        self._finish_before()
        gone = any(gradient is None for gradient in self._incoming.values())
        if gone or any(bucket.state is not BucketState.FILLING for bucket in self.buckets):
            return
        for shard in narrow:
            shard.gradient_dtype = torch.float32
        arrived, self._incoming = self._incoming, {}  # should memory be refused, step() brings them again
        self._outdated = True
        try:
            self._attach_waiting()
        except BaseException:
            self._order.clear()  # of arrivals that come again
            raise
        self._incoming = arrived
        for index in arrived:
            self._mark_present(self.shards[index])

    def _mark_present(self, shard: Shard) -> None:
        for bucket, place in self._places.get(shard.index, ()):
            bucket.present[place] = True
            bucket.missing -= 1
            self.link.received(bucket)

    def arrive(self, shard: Shard, gradient: Tensor, *, in_backward: bool = True, more_to_come: bool = False) -> None:
        """``gradient`` (flat, contiguous, ``shard.gradient_dtype``) is final; its memory is read until packed.

        ``more_to_come``: it is not, and the rest will be given to ``add()``; what it is part of is not speculated.
        """
        if shard.index in self._incoming:
            raise StateError(f"{shard.name}: a second gradient arrived without retract() in between")
        self.link.check_stream()
        self._attach_waiting()
        if in_backward and not more_to_come:
            self._stopwatch.gradient()
        self._finish_before(shard)
        self._incoming[shard.index] = gradient
        if more_to_come:
            self._awaited.add(shard.index)
        if not self._observed and in_backward:
            self._order.append(shard.index)
        buckets = self._buckets_of(shard)
        for bucket in buckets:
            self._unpack(bucket)  # packed by a decide() that came before this gradient
        self._mark_present(shard)  # first of all, so that an error further down leaves nothing half-known
        for bucket in buckets:
            if bucket.missing == 0:
                self._pack(bucket)
                if in_backward and self._is_whole(bucket) and self._worth_speculating():
                    self._speculate(bucket)

    def gradient_is(self, shard: Shard, gradient: Tensor) -> bool:
        """Whether the gradient that arrived has the bits of ``gradient``."""
        arrived = self._incoming[shard.index]
        for bucket, place in self._places.get(shard.index, ()):
            piece = bucket.pieces[place]
            theirs = gradient[piece.start : piece.start + piece.numel]
            if arrived is None or bucket.state is not BucketState.FILLING:
                # What arrived may have been overwritten since it was packed, or is gone.
                if bucket.arrival is not None:
                    wait_until_ended(bucket.arrival)  # if it was lost, decide() says so
                ours = bucket.gradient[piece.offset : piece.offset + piece.numel]
            else:
                ours = arrived[piece.start : piece.start + piece.numel]
                if ours.data_ptr() == theirs.data_ptr() and ours.dtype == theirs.dtype:
                    continue  # it is what will be packed
            # Packed in host memory; in fp32, which holds every other type, where that of its bucket is.
            if not same_bits(ours.to("cpu"), theirs.to("cpu", ours.dtype)):
                return False
        return True

    def packed_sums(self, shard: Shard) -> list[tuple[Piece, Sums]] | None:
        """Of the bits of its gradient, piece by piece; None where there are none, or some is still to be packed."""
        found = []
        again = self._incoming.get(shard.index) is not None  # else only what was packed is left of it
        for bucket, place in self._places.get(shard.index, ()):
            sums = bucket.bit_sums.get(bucket.pieces[place])
            if sums is None or (again and bucket.state is BucketState.FILLING):
                return None
            found.append((bucket.pieces[place], sums))
        return found

    def copy_packed(self, shard: Shard, into: Tensor) -> None:
        """What was packed of ``shard`` last, this step or before, as a flat tensor of its gradient's type."""
        with self._caller_at_work():
            for bucket, place in self._places.get(shard.index, ()):
                piece = bucket.pieces[place]
                assert bucket.packed is not None
                try:
                    bucket.packed.wait()
                except RuntimeError as error:
                    raise DeviceError(str(error)) from error
                packed = bucket.gradient[piece.offset : piece.offset + piece.numel]
                into[piece.start : piece.start + piece.numel].copy_(packed)
            if into.is_cuda:  # before anything is packed over it
                torch.cuda.current_stream(into.device).synchronize()

    def retract(self, shard: Shard) -> None:
        """The gradient of ``shard`` was not final after all, or is gone: undo what was done with it."""
        if shard.index not in self._incoming:
            return
        del self._incoming[shard.index]
        self._awaited.discard(shard.index)
        if not self._incoming:
            self._hypers.clear()
        if not self._observed and shard.index in self._order:
            self._order.remove(shard.index)
        for bucket, place in self._places.get(shard.index, ()):
            self._undo_one(bucket)
            self._unpack(bucket)
            bucket.present[place] = False
            bucket.missing += 1
            bucket.squares = 0.0
            self._unsummed.pop(bucket, None)
        self._partial = sum(bucket.squares for bucket in self.buckets)
        if not self._incoming:
            self.link.step_ended(whole=False)  # no other call will end it, unless gradients come again
        self._abandon_what_is_lost()
        self._raise_worker_failure()

    def restore(self, shard: Shard) -> None:
        """Undoes what was speculated on ``shard``; its gradient stays where it is. Before its master is written."""
        self._finish_before(shard)
        for bucket in self._buckets_of(shard):
            self._undo_one(bucket)
        self._abandon_what_is_lost()
        self._raise_worker_failure()

    def quiesce(self) -> None:
        """Masters and moments as after the last finished step; gradients that were packed stay packed."""
        self._finish_before()
        for bucket in self.buckets:
            self._undo_one(bucket)
        self._abandon_what_is_lost()
        self._raise_failure()

    def _abandon_what_is_lost(self) -> None:
        """A packed gradient that never reached host memory cannot be had again: its step ends with nothing changed."""
        for bucket in self.buckets:
            if bucket.arrival is not None and bucket.arrival.error and self._counts_on(bucket):
                failure, self._failure = self._failure or DeviceError(bucket.arrival.error), None
                self._finish_before()  # what the step before has left is not of this one, and fails by itself
                self._failure = failure
                self._abandon_step()
                return

    def _wait_for_arrivals(self) -> None:
        """For the packed gradients, and with them the sums. If one is lost, the step is abandoned."""
        for bucket in self.buckets:
            if bucket.state is BucketState.READY:
                self._wait(bucket)
            elif bucket.state is BucketState.SPECULATED and bucket.arrival is not None:
                try:
                    bucket.arrival.wait()
                except RuntimeError as error:
                    self._failure = self._failure or DeviceError(str(error))
        if self._failure is not None:
            self._abandon_step()
            self._raise_failure()

    def _pack(self, bucket: Bucket) -> None:
        self._keep_what_was_packed(bucket)
        grads = [
            self._incoming[piece.shard.index] if present else None
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]
        bucket.final = self._is_whole(bucket)
        with self._caller_at_work():
            ticket = self.link.pack(bucket, grads)
        bucket.arrival = bucket.packed = bucket.running = self.link.arrived(ticket)
        bucket.bit_sums = {**bucket.bit_sums, **ticket.bit_sums}
        bucket.move(BucketState.READY)
        self._packed += bucket.numel
        self._unsummed[bucket] = bucket.running
        self._stopwatch.packed(bucket.running)
        if self.link.frees_gradients:
            self._let_go_of(bucket)

    def _unpack(self, bucket: Bucket) -> None:
        """A bucket that was packed takes gradients again."""
        if bucket.state is BucketState.READY:
            bucket.move(BucketState.FILLING)
            self._packed -= bucket.numel

    def _keep_what_was_packed(self, bucket: Bucket) -> None:
        """Gradients that were let go, of a bucket that is packed again: their part of the packed one must have come."""
        if bucket.arrival is None or not self._counts_on(bucket):
            return
        try:
            with self._caller_at_work():
                bucket.arrival.wait()
        except RuntimeError as error:
            self._finish_before()  # as above
            self._abandon_step()
            self._failure = None
            raise DeviceError(str(error)) from error

    def _counts_on(self, bucket: Bucket) -> bool:
        """Whether (part of) the packed gradient of ``bucket`` is all that there is of some gradient of this step."""
        if bucket.state is BucketState.READY:
            return True
        pieces = zip(bucket.pieces, bucket.present, strict=True)
        return bucket.state is BucketState.FILLING and any(
            present and self._incoming[piece.shard.index] is None for piece, present in pieces
        )

    def _let_go_of(self, bucket: Bucket) -> None:
        """Gradients of which every part was packed: nobody reads them again, so their memory may go."""
        for piece, present in zip(bucket.pieces, bucket.present, strict=True):
            shard = piece.shard
            filling = (other.state is BucketState.FILLING for other, _ in self._places[shard.index])
            if present and self._incoming[shard.index] is not None and not any(filling):
                self._incoming[shard.index] = None
                self.listener.packed(shard)

    def _end_step(self, *, whole: bool) -> None:
        super()._end_step(whole=whole)
        self._incoming.clear()
