"""Passes the engine's events on to the parts of an optimizer, which it does not keep alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import ref

from superoffload.engine.bucket import Bucket, Shard
from superoffload.engine.options import Listener
from superoffload.errors import SuperOffloadError


class HearsOfGradients(Protocol):
    def packed(self, shard: Shard) -> None: ...
    def making_way(self) -> None: ...


class HearsOfDelivery(Protocol):
    def landing(self, buckets: Sequence[Bucket]) -> None:
        """Learns that the engine will deliver buckets that ``Delivery.apply`` has left."""

    def landed(self, buckets: Sequence[Bucket]) -> SuperOffloadError | None:
        """Learns that they were delivered; the engine raises the returned error once the delivery is complete."""


class EngineEvents(Listener):
    """Passes events on to the parts of an optimizer, as long as each part lives."""

    def __init__(self) -> None:
        self._gradients: Callable[[], HearsOfGradients | None] = _nothing
        self._delivery: Callable[[], HearsOfDelivery | None] = _nothing

    def tell(self, gradients: HearsOfGradients, delivery: HearsOfDelivery) -> None:
        """Passes events on to these parts from now on. The engine is made before them."""
        self._gradients, self._delivery = ref(gradients), ref(delivery)

    def packed(self, shard: Shard) -> None:
        alive = self._gradients()
        if alive is not None:
            alive.packed(shard)

    def making_way(self) -> None:
        alive = self._gradients()
        if alive is not None:
            alive.making_way()

    def landing(self, buckets: Sequence[Bucket]) -> None:
        alive = self._delivery()
        if alive is not None:
            alive.landing(buckets)

    def landed(self, buckets: Sequence[Bucket]) -> SuperOffloadError | None:
        alive = self._delivery()
        return None if alive is None else alive.landed(buckets)


def _nothing() -> None:
    """Returns None until ``tell()`` names a part."""
