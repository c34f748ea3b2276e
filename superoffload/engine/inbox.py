"""Holds this step's gradients from their arrival on, and packs those of complete buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import ELEMENT_TYPES, Bucket, BucketState, Piece, Shard
from superoffload.engine.executor import Executor
from superoffload.engine.layout import Layout
from superoffload.engine.options import Listener
from superoffload.errors import DeviceError, StateError
from superoffload.host.bits import Sums, same_bits
from superoffload.links.base import Link, wait_until_ended

_NEAR = 4  # buckets: so far apart are, at most, two that backward is in


class Inbox:
    """Holds gradients from their arrival until the step ends.

    ``arrived``: by the shard's index; None where all of it was packed and let go. ``unfinished``: shards, by index,
    that more is to be added to, as far as that is known. ``numel_packed``: of buckets that are packed in this step.
    """

    def __init__(self, link: Link, layout: Layout) -> None:
        self._link = link
        self._layout = layout
        self.arrived: dict[int, Tensor | None] = {}
        self.unfinished: set[int] = set()
        self.numel_packed = 0
        self._order: list[int] = []  # arrivals in backward, until the order is observed

    def shards(self) -> list[Shard]:
        """Returns the shards with a gradient, in registration order."""
        return [shard for shard in self._layout.shards if shard.index in self.arrived]

    @property
    def has_released(self) -> bool:
        """Returns whether any gradient was packed and let go."""
        return any(gradient is None for gradient in self.arrived.values())

    # ---- arriving ---------------------------------------------------------------------------------------------

    def take(self, arrivals: Sequence[tuple[Shard, Tensor]], *, in_backward: bool) -> list[Bucket]:
        """Takes gradients in the order of their arrival; returns the buckets that are complete now.

        It keeps the gradients of other buckets by its own tensors, since users may replace ``p.grad.data``.
        """
        found: dict[Bucket, list[int]] = {}
        arrived, places = self.arrived, self._layout.places
        for shard, _ in arrivals:  # before anything changes
            if shard.index in arrived:
                raise StateError(f"{shard.name}: a second gradient arrived without retract() in between")
        for shard, gradient in arrivals:
            arrived[shard.index] = gradient
            for bucket, place in places.get(shard.index, ()):
                if bucket.state is BucketState.READY:  # decide() packed it before this gradient arrived
                    self.unpack(bucket)
                found.setdefault(bucket, []).append(place)
        if in_backward and not self._layout.observed:
            self._order.extend(shard.index for shard, _ in arrivals)
        for bucket, here in found.items():
            bucket.receive(here)
            self._link.received(bucket)
            if bucket.missing:
                for index in {bucket.pieces[place].shard.index for place in here}:
                    if (kept := arrived[index]) is not None:
                        arrived[index] = kept.detach()
        return [bucket for bucket in found if bucket.missing == 0]

    # ---- packed -----------------------------------------------------------------------------------------------

    def unpack(self, bucket: Bucket) -> None:
        """Has a packed bucket take gradients again."""
        if bucket.state is BucketState.READY:
            bucket.move(BucketState.FILLING)
            self.numel_packed -= bucket.numel

    def numel_whole(self) -> int:
        """Of buckets that are packed, and that no more is expected to be added to."""
        packed = [bucket for bucket in self._layout.buckets if bucket.state is not BucketState.FILLING]
        return sum(bucket.numel for bucket in packed if self.unfinished.isdisjoint(bucket.indices))

    def remove(self, shard: Shard) -> None:
        """Forgets the gradient of ``shard``. The caller tells its buckets."""
        del self.arrived[shard.index]
        self.unfinished.discard(shard.index)
        if shard.index in self._order:
            self._order.remove(shard.index)

    def counts_on(self, bucket: Bucket) -> bool:
        """Returns whether the step needs the packed gradient of ``bucket``, as it may be the only copy."""
        if bucket.state is BucketState.READY:
            return True
        return bucket.state is BucketState.FILLING and any(
            self.arrived[piece.shard.index] is None for piece in bucket.stepped_pieces()
        )

    # ---- other buckets, the end of the step -------------------------------------------------------------------

    def put_aside(self) -> dict[int, Tensor | None]:
        """Empties the inbox, so that buckets can be made anew, and returns its gradients."""
        arrived = dict(self.arrived)
        self.arrived.clear()
        return arrived

    def put_back(self, arrived: dict[int, Tensor | None]) -> None:
        """Gives the gradients that ``put_aside()`` returned to the new buckets."""
        self.arrived.update(arrived)
        for index in arrived:
            for bucket, place in self._layout.places_of(self._layout.shards[index]):
                bucket.receive([place])
                self._link.received(bucket)

    def forget_order(self) -> None:
        """Forgets the order of arrivals, since the same gradients will arrive again."""
        self._order.clear()

    def end_step(self) -> list[int]:
        """Forgets this step; returns the order of its arrivals, empty once the layout has observed one."""
        order, self._order = self._order, []
        self.arrived.clear()
        self.unfinished.clear()
        self.numel_packed = 0
        return order


@dataclass(eq=False, repr=False)
class Packer:
    """Packs the gradients of buckets and reads their packed gradients."""

    _link: Link
    _layout: Layout
    _inbox: Inbox
    _executor: Executor
    _listener: Listener

    def pack(self, bucket: Bucket) -> None:
        """Has the link pack the gradients of ``bucket`` that have arrived."""
        arrived, whole = self._inbox.arrived, self._inbox.unfinished.isdisjoint(bucket.indices)
        grads = [
            arrived[piece.shard.index] if present else None
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]
        bucket.final = whole
        ticket = self._executor.pack(bucket, grads)
        bucket.mark_packed(ticket.completion, ticket.bit_sums)
        self._inbox.numel_packed += bucket.numel
        if self._link.frees_gradients:
            self._release(bucket)

    def _release(self, bucket: Bucket) -> None:
        """Drops the gradients of which every part was packed: nothing reads them again."""
        for piece in bucket.stepped_pieces():
            shard = piece.shard
            filling = (other.state is BucketState.FILLING for other in self._layout.buckets_of(shard))
            if self._inbox.arrived.get(shard.index) is not None and not any(filling):
                self._inbox.arrived[shard.index] = None
                self._listener.packed(shard)

    # ---- on its way ------------------------------------------------------------------------------

    def await_earlier_part(self, bucket: Bucket, arrival: _native.Completion) -> None:
        """Before a bucket is packed again: where gradients were let go, their part of the packed one must have come.

        ``arrival``: of what was packed before. DeviceError: it was lost, and cannot be had again.
        """
        if self._inbox.counts_on(bucket):
            with self._executor.caller_at_work():
                _await(arrival)

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

    # ---- what was packed --------------------------------------------------------------------------------------

    def gradient_is(self, shard: Shard, gradient: Tensor) -> bool:
        """Returns whether the gradient that arrived has the bits of ``gradient``."""
        arrived = self._inbox.arrived.get(shard.index)
        for bucket, place in self._layout.places_of(shard):
            piece = bucket.pieces[place]
            theirs = piece.of(gradient)
            if arrived is None or bucket.state is not BucketState.FILLING:
                # What arrived may have been overwritten since it was packed, or is gone.
                if bucket.arrival is not None:
                    wait_until_ended(bucket.arrival)  # if it was lost, decide() says so
                ours = _packed(bucket, piece)
            else:
                ours = piece.of(arrived.detach().view(-1))
                if ours.data_ptr() == theirs.data_ptr() and ours.dtype == theirs.dtype:
                    continue  # it is what will be packed
            # Packed in host memory; in fp32, which holds every other type, where that of its bucket is.
            if not same_bits(ours.to("cpu"), theirs.to("cpu", ours.dtype)):
                return False
        return True

    def packed_sums(self, shard: Shard) -> list[tuple[Piece, Sums]] | None:
        """Returns the sums of the packed bits, piece by piece; None if any piece has none or must be packed again."""
        found = []
        again = self._inbox.arrived.get(shard.index) is not None  # else only what was packed is left of it
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
                piece.of(into).copy_(_packed(bucket, piece))
            if into.is_cuda:  # before anything is packed over it
                torch.cuda.current_stream(into.device).synchronize()

    # ---- sums of several backward passes, without memory for them where gradients are made -----------------------

    def add(self, places: Sequence[tuple[Bucket, int]], addend: Tensor) -> None:
        """Adds a flat tensor in host memory to a shard's packed gradient at these places; nothing may run on them."""
        for bucket, place in places:
            piece = bucket.pieces[place]
            packed = _packed(bucket, piece)
            total = packed + piece.of(addend)
            _native.pack(
                gradient=total.data_ptr(),
                packed=packed.data_ptr(),
                type=ELEMENT_TYPES[bucket.gradient_dtype],
                numel=piece.numel,
                block_sums=piece.sums_address,
            )
        self._link.came_down(addend.nbytes)


def _packed(bucket: Bucket, piece: Piece) -> Tensor:
    return bucket.gradient[piece.offset : piece.offset + piece.numel]


def _await(arrival: _native.Completion) -> None:
    try:
        arrival.wait()
    except RuntimeError as error:
        raise DeviceError(str(error)) from error


class PassedBuckets:
    """Finds buckets that backward has passed although gradients are missing, as those of experts without a token.

    Such a bucket is packed with the gradients that it has, so that it can be stepped during backward. That is a guess:
    a gradient that comes later undoes the step, and no result changes. One gradient in a later bucket says little, as
    the place of a shard without a gradient in the first step is a guess, too. So backward has passed a bucket when it
    is in two later ones that are near each other.
    """

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def begins(self, bucket: Bucket, waiting: Iterable[Bucket]) -> list[Bucket]:
        """Notes the first gradient of ``bucket`` in this step; returns those of the ``waiting`` that are passed."""
        number = bucket.number
        self._begun.add(number)
        before = next((near for near in range(number - 1, number - _NEAR, -1) if near in self._begun), 0)
        return [one for one in waiting if one.number < before and not one.waits_for_all]

    def end_step(self) -> None:
        """Forgets this step."""
        self._begun.clear()
