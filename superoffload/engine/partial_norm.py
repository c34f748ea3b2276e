"""Part of the gradient norm is known while backward still runs."""

from __future__ import annotations

from collections.abc import Callable

from superoffload import _native
from superoffload.engine.bucket import BLOCK, Bucket


class PartialNorm:
    """Sums the squares of packed gradients as they reach host memory, for an early stop of speculation.

    ``is_whole`` returns whether no addition to a bucket's gradients is expected.
    """

    def __init__(self, is_whole: Callable[[Bucket], bool]) -> None:
        self.squares = 0.0  # of the buckets in ``_known``
        self._is_whole = is_whole
        self._known: dict[Bucket, float] = {}
        self._waiting: dict[Bucket, _native.Completion] = {}  # packed, not in the sum yet

    def expect(self, bucket: Bucket, arrival: _native.Completion) -> None:
        """Includes ``bucket`` from when ``arrival`` is done."""
        self._waiting[bucket] = arrival

    def forget(self, bucket: Bucket) -> None:
        """Takes ``bucket`` out of the sum, since its packed gradient changes."""
        self._waiting.pop(bucket, None)
        if self._known.pop(bucket, None) is not None:
            self.squares = sum(self._known.values())

    def look(self) -> float:
        """Returns the sum of squares of all buckets that have arrived by now."""
        for bucket, arrival in list(self._waiting.items()):
            if not arrival.done() or arrival.error or not self._is_whole(bucket):
                continue
            del self._waiting[bucket]
            again = bucket in self._known
            self._known[bucket] = _squares_of(bucket)
            self.squares = sum(self._known.values()) if again else self.squares + self._known[bucket]
        return self.squares

    def clear(self) -> None:
        self.squares = 0.0
        self._known.clear()
        self._waiting.clear()


def _squares_of(bucket: Bucket) -> float:
    pieces = bucket.stepped_pieces()
    return sum(_native.fold_sums([(piece.sums_address, -(-piece.numel // BLOCK)) for piece in pieces]))
