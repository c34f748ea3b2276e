"""What the owner of an engine can be told while it works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superoffload.engine.bucket import Bucket, Shard
    from superoffload.errors import SuperOffloadError


class Listener:
    """Hears nothing. Owners of an engine that want to hear something derive from it.

    An engine keeps its listener alive. An owner that must not be kept alive by its engine holds itself weakly in there.
    """

    def packed(self, shard: Shard) -> None:
        """The link needs the gradient of ``shard`` no more: its memory may go."""

    def making_way(self) -> None:
        """All buckets are about to be laid out anew, and what is packed in them goes with them."""

    def moved(self, shard: Shard) -> None:
        """Master and moments of ``shard`` are other tensors than before."""

    def landing(self, buckets: Sequence[Bucket]) -> None:
        """Buckets that ``apply(later=True)`` has left are about to be delivered.

        Pieces that are taken out of ``bucket.present`` are not.
        """

    def landed(self, buckets: Sequence[Bucket]) -> SuperOffloadError | None:
        """They were delivered. What is returned is raised once everything is in order."""
        return None
