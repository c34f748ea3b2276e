"""Shards and the buckets that they are cut into, in the order in which backward completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from superoffload import _native
from superoffload.bucket import Bucket, GroupHyper, Shard, lay_out
from superoffload.engine.listener import Listener
from superoffload.link import Link
from superoffload.memory import exceeds_caches, is_out_of_memory
from superoffload.pipeline.options import CoreOptions
from superoffload.placement import Placer, ResidentWork, move_state
from superoffload.placement_choice import Measured

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
        self._numel = 0  # of all buckets
        self.timeline: Timeline | None = None  # sets itself, and stands before link and pool, where a trace is wanted
        self._clock = options.clock
        self._may_settle_later = options.two_phase
        self._bucket_numel = options.bucket_numel
        self._hyper_of = hyper_of
        self._places: dict[int, list[tuple[Bucket, int]]] = {}
        self._order: list[int] = []  # arrivals of the first backward
        self._backward: list[int] = []  # what followed from them
        self._observed = False
        self._unattached: list[list[Shard]] = []  # shards, in the order of backward, whose buckets are to be made
        self._outdated = False  # the buckets that there are, whose packed gradients may still be needed
        self.listener = Listener()
        self.placer: Placer | None = None  # sets which shards are resident, where some shall be

    def add_shards(self, shards: Sequence[Shard]) -> None:
        """New shards, in registration order. Their buckets follow those there are, in reverse order."""
        self.shards.extend(shards)
        self._unattached.append(list(reversed(shards)))
        self._attach_waiting()

    def _attach_waiting(self) -> None:
        """Where memory was refused the next gradient tries again: none may arrive and be stepped by nobody."""
        if self._outdated:
            self._give_up_buckets()
        while self._unattached:
            self._attach(lay_out(self._unattached[0], self._numel_per_bucket()))
            del self._unattached[0]

    def _give_up_buckets(self) -> None:
        self.listener.making_way()
        known = set(self._backward)
        order = self._backward + [shard.index for shard in reversed(self.shards) if shard.index not in known]
        self.buckets, self._places = [], {}
        self._unattached = [[self.shards[i] for i in order]]
        self._outdated = False

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
            if bucket.resident:
                self._attach_resident(bucket)
            else:
                self.link.attach(bucket)
                bucket.make_work(_journal_bytes(bucket) if speculates else 0, past_cache=past_cache)
        for bucket in buckets:
            for i, piece in enumerate(bucket.pieces):
                self._places.setdefault(piece.shard.index, []).append((bucket, i))
        self.buckets.extend(buckets)
        self._numel = sum(bucket.numel for bucket in self.buckets)

    def _attach_resident(self, bucket: Bucket) -> None:
        assert self.placer is not None
        self.placer.residency.attach(bucket)
        bucket.work = _native.BucketWork([], 0)
        bucket.resident_work = ResidentWork(bucket)

    def _buckets_of(self, shard: Shard) -> list[Bucket]:
        return [bucket for bucket, _ in self._places.get(shard.index, ())]

    def _follow_observed_order(self, order: list[int]) -> None:
        """Once, after the first step: buckets in the order in which gradients really arrive."""
        before = [shard.index for shard in reversed(self.shards)]
        seen = set(order)
        self._backward = order + [index for index in before if index not in seen]
        self._observed = True
        if self._place() or self._backward != before:
            self._lay_out_again()

    def _lay_out_again(self) -> None:
        """At once, unless gradients are gone but for what was packed of them, which is needed as long as it is shown:
        then with ``make_way()``, or the next gradient."""
        self._outdated = True
        if not self.link.frees_gradients:
            self._attach_waiting()

    def make_way(self) -> None:
        """Nothing of the step before is needed any more."""
        if self._outdated:
            self._attach_waiting()

    # ---- which state is on the accelerator --------------------------------------------------------------------

    def _place(self) -> bool:
        """Moves state to where the placer wants it, between steps; buckets must then be laid out again."""
        if self.placer is None:
            return False
        wanted = self.placer.choose([self.shards[i] for i in self._backward])
        moving = [shard for shard in self.shards if shard.resident != (shard.index in wanted)]
        moved = 0
        for shard in sorted(moving, key=lambda shard: not shard.resident):  # those that make room first
            try:
                move_state(shard, None if shard.resident else self.placer.residency.device)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.placer.why += f"; the accelerator had no room left for {shard.name} and what would have followed"
                break
            moved += 1
            self.listener.moved(shard)
        return moved > 0

    def _measured(self) -> Measured | None:
        """What "auto" chooses by; None where nothing could be timed so far."""
        assert self.placer is not None
        times = self.policy.times
        numel = sum(shard.numel for shard in self.shards)
        if not times.known or numel == 0:
            return None
        state = sum(shard.numel * (4 + 2 * shard.exp_avg.element_size()) for shard in self.shards)
        gradients = sum(shard.numel * shard.gradient_dtype.itemsize for shard in self.shards)
        return Measured(
            backward=times.backward,
            optimizer=times.seconds(_native.Operation.step, numel),
            free_bytes=self.placer.residency.free_bytes(),
            numel=numel,
            bytes_per_param=(state + gradients) / numel,
            buckets=len(self.buckets),
        )


def _journal_bytes(bucket: Bucket) -> int:
    return int(JOURNAL_BYTES_PER_PARAM * bucket.padded) + _JOURNAL_BYTES_PER_BUCKET
