"""After the verdict every bucket with gradients is committed, replayed, stepped, or published and settled later."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from superoffload import _native
from superoffload.engine.bucket import Bucket
from superoffload.engine.bucket_state import BucketState
from superoffload.engine.executor import Executor
from superoffload.engine.layout import Layout
from superoffload.engine.schedule import Schedule, Situation
from superoffload.engine.snapshot import Snapshots
from superoffload.engine.speculator import Speculator
from superoffload.engine.stats import Stats
from superoffload.errors import DeviceError, TornStep
from superoffload.links.base import Link

Operation = _native.Operation


class Finisher:
    """Gives buckets their fate, with the factor that multiplies every gradient element."""

    def __init__(
        self,
        link: Link,
        layout: Layout,
        speculator: Speculator,
        executor: Executor,
        schedule: Schedule,
        snapshots: Snapshots,
        stats: Stats,
        *,
        two_phase: bool,
    ) -> None:
        self._link = link
        self._layout = layout
        self._speculator = speculator
        self._executor = executor
        self._schedule = schedule
        self._snapshots = snapshots
        self._stats = stats
        self._may_settle_later = two_phase
        self._in_two_phases: set[Bucket] = set()  # chosen for this step

    def choose_two_phases(self, moving: Sequence[Bucket], *, on_demand: bool) -> None:
        """Chooses the buckets to publish now and settle later: the first in forward order that were not speculated."""
        self._in_two_phases.clear()
        numel = sum(bucket.numel for bucket in moving)
        ready = [b for b in moving if b.state is BucketState.READY and b.work.publishes and b.held is None]
        waiting = sum(bucket.numel for bucket in ready)
        if not (self._may_settle_later and self._layout.observed and numel):
            return
        self._schedule.speculated(1.0 - waiting / numel)
        situation = Situation(numel, waiting, len(moving), apart=self._link.asynchronous, on_demand=on_demand)
        left = self._schedule.share_to_publish(situation) * waiting
        for bucket in ready:
            if left < bucket.numel / 2:
                break
            left -= bucket.numel
            self._in_two_phases.add(bucket)

    def finish(self, bucket: Bucket, factor: float) -> None:
        """Commits a bucket that was speculated with ``factor``; hands any other to the worker threads."""
        if bucket.state is BucketState.SPECULATED and bucket.frozen != self._executor.hyper(bucket.group):
            self._speculator.undo(bucket)  # lr, betas, eps or weight_decay changed after speculation
        if bucket.state is BucketState.SPECULATED and _same_bits(bucket.factor, factor):
            bucket.work.release_journal()
            bucket.move(BucketState.COMMITTED)
            self._stats.add(buckets_committed=1)
        elif bucket.state is BucketState.SPECULATED:
            self._link.unstage(bucket)  # the replay writes the shadow that it was copied from
            self._run(bucket, factor, Operation.replay, BucketState.REPLAYED)
            self._stats.add(buckets_replayed=1)
        elif bucket in self._in_two_phases and bucket.work.take_halves():
            self._snapshots.protect(piece.shard for piece in bucket.pieces)
            self._run(bucket, factor, Operation.publish, BucketState.PUBLISHED)
            self._stats.add(buckets_two_phase=1)
        else:
            self._snapshots.protect(piece.shard for piece in bucket.pieces)
            self._run(bucket, factor, Operation.step, BucketState.STEPPED)
            self._stats.add(buckets_stepped=1)

    def _run(self, bucket: Bucket, factor: float, operation: _native.Operation, state: BucketState) -> None:
        if self._link.in_place:
            self._layout.describe(bucket)
        self._executor.freeze(bucket, factor)
        self._executor.submit(bucket, operation)
        bucket.move(state)

    def step_resident(self, buckets: Sequence[Bucket], factor: float, *, shared: bool) -> None:
        """Steps buckets whose state is on the accelerator, before all others.

        Raises DeviceError if the device refuses the first bucket: nothing has changed. Raises TornStep if only some of
        the buckets were stepped, or where other ranks act on the same verdict (``shared``).
        """
        for number, bucket in enumerate(buckets):
            assert self._layout.placer is not None
            self._snapshots.protect(piece.shard for piece in bucket.pieces)
            self._executor.freeze(bucket, factor)
            try:
                self._layout.placer.residency.step(bucket)
            except DeviceError as error:
                if number or shared:
                    raise TornStep(
                        f"{error}; some parameters are of this step and some of the one before: make a new optimizer "
                        "and load the last checkpoint"
                    ) from error
                raise
            bucket.move(BucketState.STEPPED)
            self._stats.add(buckets_stepped=1)


def _same_bits(factor: float, other: float) -> bool:
    """Returns whether both factors have the same bits in fp32, as the kernels round them; 0 and -0 differ."""
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.float32(factor).tobytes() == np.float32(other).tobytes())
