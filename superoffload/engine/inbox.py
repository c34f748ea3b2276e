"""The inbox knows which gradients of this step have arrived, which are packed, and which are not final yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from torch import Tensor

from superoffload.engine.bucket import Bucket, BucketState, Shard
from superoffload.engine.layout import Layout
from superoffload.errors import StateError
from superoffload.links.base import Link


class Inbox:
    """Holds gradients from their arrival until the end of the step."""

    def __init__(self, link: Link, layout: Layout) -> None:
        self._link = link
        self._layout = layout
        self._arrived: dict[int, Tensor | None] = {}  # None: packed and let go
        self._unfinished: set[int] = set()  # shards whose gradients are not final
        self._packed = 0  # elements of packed buckets
        self._order: list[int] = []  # arrivals in backward, until the order is observed

    def __contains__(self, shard: Shard) -> bool:
        """Returns whether a gradient of ``shard`` has arrived in this step."""
        return shard.index in self._arrived

    def __bool__(self) -> bool:
        """Returns whether any gradient has arrived in this step."""
        return bool(self._arrived)

    def indices(self) -> Set[int]:
        """Returns the indices of the shards with a gradient."""
        return self._arrived.keys()

    def shards(self) -> list[Shard]:
        """Returns the shards with a gradient, in registration order."""
        return [shard for shard in self._layout.shards if shard.index in self._arrived]

    def gradient_of(self, shard: Shard) -> Tensor | None:
        """Returns the gradient that arrived; None where all of it was packed and let go."""
        return self._arrived.get(shard.index)

    @property
    def has_let_go(self) -> bool:
        """Returns whether any gradient was packed and let go."""
        return any(gradient is None for gradient in self._arrived.values())

    def gradients_of(self, bucket: Bucket) -> list[Tensor | None]:
        """Returns the gradient of each piece's shard; None where none has arrived."""
        arrived = self._arrived
        return [
            arrived[piece.shard.index] if present else None
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]

    # ---- arriving ---------------------------------------------------------------------------------------------

    def take(self, arrivals: Sequence[tuple[Shard, Tensor]], *, in_backward: bool) -> list[Bucket]:
        """Takes gradients in the order of their arrival; returns the buckets that are complete now.

        It keeps the gradients of other buckets by its own tensors, since users may replace ``p.grad.data``.
        """
        found: dict[Bucket, list[int]] = {}
        arrived, places = self._arrived, self._layout.places
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
                    arrived[index] = _own(arrived[index])
        return [bucket for bucket in found if bucket.missing == 0]

    # ---- packed -----------------------------------------------------------------------------------------------

    def is_packed(self, bucket: Bucket) -> None:
        """Notes that ``bucket`` was packed."""
        self._packed += bucket.numel

    def unpack(self, bucket: Bucket) -> None:
        """Has a packed bucket take gradients again."""
        if bucket.state is BucketState.READY:
            bucket.move(BucketState.FILLING)
            self._packed -= bucket.numel

    def share_packed(self) -> float:
        """Returns the share of all elements that are in packed buckets with whole gradients."""
        numel = self._packed
        if self._unfinished:
            packed = (bucket for bucket in self._layout.buckets if bucket.state is not BucketState.FILLING)
            numel = sum(bucket.numel for bucket in packed if self.is_whole(bucket))
        return numel / self._layout.numel

    def remove(self, shard: Shard) -> None:
        """Forgets the gradient of ``shard``. The caller tells its buckets."""
        del self._arrived[shard.index]
        self._unfinished.discard(shard.index)
        if shard.index in self._order:
            self._order.remove(shard.index)

    def let_go(self, shard: Shard) -> None:
        """Drops a gradient that was packed wholly: nothing reads it again."""
        self._arrived[shard.index] = None

    def counts_on(self, bucket: Bucket) -> bool:
        """Returns whether the step needs the packed gradient of ``bucket``, as it may be the only copy."""
        if bucket.state is BucketState.READY:
            return True
        return bucket.state is BucketState.FILLING and any(
            self._arrived[piece.shard.index] is None for piece in bucket.stepped_pieces()
        )

    # ---- gradients that are not final -------------------------------------------------------------------------

    def expect_more(self, indices: Iterable[int]) -> None:
        """Notes that more will be added to the gradients of these shards before the step ends."""
        self._unfinished.update(indices)

    def expect_no_more(self, shard: Shard) -> None:
        self._unfinished.discard(shard.index)

    def is_whole(self, bucket: Bucket) -> bool:
        """Returns whether no addition to the gradients of ``bucket`` is expected."""
        return not self._unfinished or self._unfinished.isdisjoint(piece.shard.index for piece in bucket.pieces)

    # ---- other buckets, the end of the step -------------------------------------------------------------------

    def put_aside(self) -> dict[int, Tensor | None]:
        """Empties the inbox, so that buckets can be made anew, and returns its gradients."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def put_back(self, arrived: dict[int, Tensor | None]) -> None:
        """Gives the gradients that ``put_aside()`` returned to the new buckets."""
        self._arrived = arrived
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
        self._arrived.clear()
        self._unfinished.clear()
        self._packed = 0
        return order


def _own(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach()
