"""This step's gradients: which have arrived, which of them are packed, and what of each is still to come."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from superoffload.bucket import Bucket, BucketState, Shard
from superoffload.engine.layout import Layout
from superoffload.link import Link


class Inbox:
    """Holds gradients from their arrival until the step ends."""

    def __init__(self, link: Link, layout: Layout) -> None:
        self._link = link
        self._layout = layout
        self._arrived: dict[int, Tensor | None] = {}  # None: packed, and let go
        self._unfinished: set[int] = set()  # shards that more is to be added to, as far as that is known
        self._order: list[int] = []  # arrivals in backward, until the order is observed

    def __contains__(self, shard: Shard) -> bool:
        """Whether a gradient of ``shard`` has arrived in this step."""
        return shard.index in self._arrived

    def __bool__(self) -> bool:
        """Whether any has."""
        return bool(self._arrived)

    def shards(self) -> list[Shard]:
        """Those with a gradient, in registration order."""
        return [shard for shard in self._layout.shards if shard.index in self._arrived]

    def gradient_of(self, shard: Shard) -> Tensor | None:
        """What has arrived; None where all of it was packed and let go."""
        return self._arrived.get(shard.index)

    @property
    def has_let_go(self) -> bool:
        """Whether some gradient was packed and let go."""
        return any(gradient is None for gradient in self._arrived.values())

    # ---- arriving ---------------------------------------------------------------------------------------------

    def take(self, shard: Shard, gradient: Tensor, *, in_backward: bool) -> None:
        """``gradient`` has arrived. First of all, so that an error further down leaves nothing half-known."""
        self._arrived[shard.index] = gradient
        if in_backward and not self._layout.observed:
            self._order.append(shard.index)

    def tell_buckets(self, shard: Shard) -> None:
        """The buckets of ``shard`` have its gradient."""
        for bucket, place in self._layout.places_of(shard):
            bucket.receive(place)
            self._link.received(bucket)

    def remove(self, shard: Shard) -> None:
        """The gradient has not arrived after all. Its buckets are to be told apart."""
        del self._arrived[shard.index]
        self._unfinished.discard(shard.index)
        if shard.index in self._order:
            self._order.remove(shard.index)

    def let_go(self, shard: Shard) -> None:
        """All of the gradient was packed, and nothing reads it again."""
        self._arrived[shard.index] = None

    def counts_on(self, bucket: Bucket) -> bool:
        """Whether (part of) the packed gradient of ``bucket`` is all that there is of some gradient of this step."""
        if bucket.state is BucketState.READY:
            return True
        return bucket.state is BucketState.FILLING and any(
            self._arrived[piece.shard.index] is None for piece in bucket.stepped_pieces()
        )

    # ---- what is still to come --------------------------------------------------------------------------------

    def expect_more(self, indices: Iterable[int]) -> None:
        """More is to be added to the gradients of these shards before the step ends."""
        self._unfinished.update(indices)

    def expect_no_more(self, shard: Shard) -> None:
        self._unfinished.discard(shard.index)

    @property
    def expects_more(self) -> bool:
        """Whether more is expected for any gradient that has arrived."""
        return bool(self._unfinished)

    def is_whole(self, bucket: Bucket) -> bool:
        """Whether no more is expected to be added to what has arrived of ``bucket``."""
        return not self._unfinished or self._unfinished.isdisjoint(piece.shard.index for piece in bucket.pieces)

    # ---- other buckets, the end of the step -------------------------------------------------------------------

    def put_aside(self) -> dict[int, Tensor | None]:
        """Empties the inbox, so that buckets can be made anew, and returns what was in it."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def put_back(self, arrived: dict[int, Tensor | None]) -> None:
        """What ``put_aside()`` returned, into other buckets."""
        self._arrived = arrived
        for index in arrived:
            self.tell_buckets(self._layout.shards[index])

    def forget_order(self) -> None:
        """Gradients that have arrived come again, in their order."""
        self._order.clear()

    def end_step(self) -> list[int]:
        """Forgets this step; returns the order in which its gradients arrived, where that is not known yet."""
        order, self._order = self._order, []
        self._arrived.clear()
        self._unfinished.clear()
        return order
