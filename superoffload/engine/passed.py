"""Finds buckets that backward has passed although gradients are missing, as those of experts without a token.

Such a bucket is packed with the gradients that it has, so that it can be stepped during backward. That is a guess: a
gradient that comes later undoes the step, and no result changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from superoffload.engine.bucket import Bucket

_NEAR = 4  # buckets


class Passed:
    """Watches in which buckets backward is. One gradient says little, as the place of a shard without a gradient in the
    first step is a guess. So backward has passed a bucket when it is in two later ones that are near each other."""

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
