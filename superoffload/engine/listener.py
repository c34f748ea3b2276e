"""A listener tells the owner of an engine about events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superoffload.engine.bucket import Bucket, Shard
    from superoffload.errors import SuperOffloadError


class Listener:
    """Ignores all events; subclasses act on them.

    An engine keeps its listener alive. A listener refers to its owner weakly where the engine must not keep that alive.
    """

    def packed(self, shard: Shard) -> None:
        """Learns that the link no longer needs the gradient of ``shard``: its memory may be freed."""

    def making_way(self) -> None:
        """Learns that all buckets will be laid out anew, and their packed gradients will be lost."""

    def landing(self, buckets: Sequence[Bucket]) -> None:
        """Learns that buckets which ``apply(later=True)`` has left will be delivered.

        Pieces that it takes out of ``bucket.present`` are not delivered.
        """

    def landed(self, buckets: Sequence[Bucket]) -> SuperOffloadError | None:
        """Learns that they were delivered. The engine raises the returned error once the delivery is complete."""
        return None
