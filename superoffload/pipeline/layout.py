"""Shards and the buckets that they are cut into, in the order in which backward completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from superoffload.bucket import Bucket, GroupHyper, Shard, lay_out
from superoffload.link import Link
from superoffload.memory import exceeds_caches
from superoffload.pipeline.options import CoreOptions

if TYPE_CHECKING:
    from superoffload.timeline import Timeline

# Reserved per parameter and speculating bucket. One-byte codes leave 1.5 bytes for escapes, two-byte codes 0.5; and
# a little more, since the fewer parameters a bucket has the less they average out.
JOURNAL_BYTES_PER_PARAM = 2.5
_JOURNAL_BYTES_PER_BUCKET = 1024
_SMALLEST_BUCKET, _LARGEST_BUCKET, _BUCKETS = 1 << 16, 1 << 25, 32


class Layout:
    """What there is: link, schedule, worker threads, shards and buckets."""

    def __init__(self, link: Link, options: CoreOptions, hyper_of: Callable[[int], GroupHyper]) -> None:
        self.link = link
        self.policy = options.make_schedule()
        self.pool = options.make_pool()
        self.shards: list[Shard] = []
        self.buckets: list[Bucket] = []
        self.timeline: Timeline | None = None  # sets itself, and stands before link and pool, where a trace is wanted
        self._clock = options.clock
        self._may_settle_later = options.two_phase
        self._bucket_numel = options.bucket_numel
        self._hyper_of = hyper_of
        self._places: dict[int, list[tuple[Bucket, int]]] = {}
        self._order: list[int] = []  # arrivals of the first backward
        self._observed = False

    def add_shards(self, shards: Sequence[Shard]) -> None:
        """New shards, in registration order. Their buckets follow those there are, in reverse order."""
        self.shards.extend(shards)
        self._attach(lay_out(list(reversed(shards)), self._numel_per_bucket()))

    def _numel_per_bucket(self) -> int:
        if self._bucket_numel is not None:
            return self._bucket_numel
        total = sum(shard.numel for shard in self.shards)
        return min(max(total // _BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)

    def _attach(self, buckets: Sequence[Bucket]) -> None:
        speculates = self.policy.mode != "never"
        past_cache = exceeds_caches(sum(shard.numel for shard in self.shards))
        self.link.prepare(buckets, anew=not self.buckets)
        for bucket in buckets:
            self.link.attach(bucket)
            bucket.make_work(_journal_bytes(bucket) if speculates else 0, past_cache=past_cache)
            for i, piece in enumerate(bucket.pieces):
                self._places.setdefault(piece.shard.index, []).append((bucket, i))
        self.buckets.extend(buckets)

    def _buckets_of(self, shard: Shard) -> list[Bucket]:
        return [bucket for bucket, _ in self._places.get(shard.index, ())]

    def _follow_observed_order(self) -> None:
        """Once, after the first step: buckets in the order in which gradients really arrive."""
        before = [shard.index for shard in reversed(self.shards)]
        seen = set(self._order)
        order = self._order + [index for index in before if index not in seen]
        self._observed = True
        if order == before:
            return
        self.buckets, self._places = [], {}
        self._attach(lay_out([self.shards[i] for i in order], self._numel_per_bucket()))


def _journal_bytes(bucket: Bucket) -> int:
    return int(JOURNAL_BYTES_PER_PARAM * bucket.padded) + _JOURNAL_BYTES_PER_BUCKET
