"""This step's gradients: which have arrived, which of them are packed, and what of each is still to come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from torch import Tensor

from superoffload.engine.bucket import Bucket, BucketState, Shard
from superoffload.engine.layout import Layout
from superoffload.errors import StateError
from superoffload.links.base import Link


class Inbox:
    """Holds gradients from their arrival until the step ends."""

    def __init__(self, link: Link, layout: Layout) -> None:
        self._link = link
        self._layout = layout
        self._arrived: dict[int, Tensor | None] = {}  # None: packed, and let go
        self._unfinished: set[int] = set()  # shards that more is to be added to, as far as that is known
        self._packed = 0  # elements of buckets that are packed in this step
        self._order: list[int] = []  # arrivals in backward, until the order is observed

    def __contains__(self, shard: Shard) -> bool:
        """Whether a gradient of ``shard`` has arrived in this step."""
        return shard.index in self._arrived

    def __bool__(self) -> bool:
        """Whether any has."""
        return bool(self._arrived)

    def indices(self) -> Set[int]:
        """Those with a gradient, by index."""
        return self._arrived.keys()

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

    def gradients_of(self, bucket: Bucket) -> list[Tensor | None]:
        """What has arrived of each piece; None where nothing has."""
        arrived = self._arrived
        return [
            arrived[piece.shard.index] if present else None
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]

    # ---- arriving ---------------------------------------------------------------------------------------------

    def take(self, arrivals: Sequence[tuple[Shard, Tensor]], *, in_backward: bool) -> list[Bucket]:
        """Gradients that have arrived, in their order. Returns the buckets that have all of theirs now.

        Those of other buckets are kept by tensors of our own: a user may put other memory into ``p.grad.data``.
        """
        found: dict[Bucket, list[int]] = {}
        arrived, places = self._arrived, self._layout.places
        for shard, _ in arrivals:  # before anything changes
            if shard.index in arrived:
                raise StateError(f"{shard.name}: a second gradient arrived without retract() in between")
        for shard, gradient in arrivals:
            arrived[shard.index] = gradient
            for bucket, place in places.get(shard.index, ()):
                if bucket.state is BucketState.READY:  # packed by a decide() that came before this gradient
                    self.unpack(bucket)
                found.setdefault(bucket, []).append(place)
        if in_backward and not self._layout.observed:
            self._order.extend(shard.index for shard, _ in arrivals)
        for bucket, here in found.items():
            bucket.receive(here)
            self._link.received(bucket)
            if bucket.missing:
                for index in {bucket.pieces[place].shard.index for place in here}:
                    arrived[index] = _own(arrived[index])
        return [bucket for bucket in found if bucket.missing == 0]

    # ---- packed -----------------------------------------------------------------------------------------------

    def is_packed(self, bucket: Bucket) -> None:
        """What has arrived of ``bucket`` was packed."""
        self._packed += bucket.numel

    def unpack(self, bucket: Bucket) -> None:
        """A bucket that was packed takes gradients again."""
        if bucket.state is BucketState.READY:
            bucket.move(BucketState.FILLING)
            self._packed -= bucket.numel

    def share_packed(self) -> float:
        """Of all elements, those of buckets that are packed and whole."""
        numel = self._packed
        if self._unfinished:
            packed = (bucket for bucket in self._layout.buckets if bucket.state is not BucketState.FILLING)
            numel = sum(bucket.numel for bucket in packed if self.is_whole(bucket))
        return numel / self._layout.numel

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
            for bucket, place in self._layout.places_of(self._layout.shards[index]):
                bucket.receive([place])
                self._link.received(bucket)

    def forget_order(self) -> None:
        """Gradients that have arrived come again, in their order."""
        self._order.clear()

    def end_step(self) -> list[int]:
        """Forgets this step; returns the order in which its gradients arrived, where that is not known yet."""
        order, self._order = self._order, []
        self._arrived.clear()
        self._unfinished.clear()
        self._packed = 0
        return order


def _own(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach()
