"""Buckets are stepped here before the verdict is known, and undone where that was wrong."""

from __future__ import annotations

import math

from superoffload import _native
from superoffload.engine.bucket import Bucket, BucketState
from superoffload.engine.executor import Executor
from superoffload.engine.inbox import Inbox
from superoffload.engine.layout import Layout
from superoffload.engine.packer import Packer
from superoffload.engine.schedule import Schedule
from superoffload.engine.snapshot import Snapshots
from superoffload.engine.stats import Stats
from superoffload.links.base import Link


class Speculator:
    """Speculates packed buckets, each with a journal, and undoes them."""

    def __init__(
        self,
        link: Link,
        layout: Layout,
        inbox: Inbox,
        packer: Packer,
        executor: Executor,
        schedule: Schedule,
        snapshots: Snapshots,
        stats: Stats,
    ) -> None:
        self._link = link
        self._layout = layout
        self._inbox = inbox
        self._packer = packer
        self._executor = executor
        self._schedule = schedule
        self._snapshots = snapshots
        self._stats = stats
        self._speculating = True  # no early stop in this step so far
        self._proves_clip = math.inf
        self._unscale = 1.0
        self._journaled_numel = 0  # of the buckets whose speculation the last step kept
        self._journaled_bytes = 0

    def expect(self, *, unscale: float, max_grad_norm: float | None) -> None:
        """Sets the terms that the next verdict will most likely have; if it has them, speculation is right."""
        self._unscale = unscale
        self._proves_clip = math.inf
        if max_grad_norm is not None and unscale != 0.0:
            norm = max_grad_norm / abs(unscale)
            self._proves_clip = norm * norm * (1 + 1e-6)  # norm ** 2 would raise OverflowError instead of giving inf

    def is_worthwhile(self) -> bool:
        """Returns whether a bucket that is packed now should be speculated."""
        if self._speculating:
            # Stop early: a gradient is not finite, or the known part of the norm proves a clip.
            self._speculating = self._packer.norm.look() < self._proves_clip
            if not self._speculating:
                self.withdraw()
        return self._speculating and self._schedule.wants(self._inbox.share_packed())

    def speculate(self, bucket: Bucket) -> None:
        """Steps a packed bucket with a journal, unless its journal overflowed lately."""
        if bucket.resident:  # the accelerator steps it after the verdict
            return
        width = bucket.journal_width.choose(bucket.work, bucket.next_step())
        if width is None:
            return
        self._snapshots.protect(piece.shard for piece in bucket.pieces)
        self._executor.freeze(bucket, self._unscale)
        self._executor.submit(bucket, _native.Operation.step_journaled, width)
        bucket.move(BucketState.SPECULATED)
        assert bucket.running is not None
        self._link.stage(bucket, bucket.running)
        self._stats.add(buckets_speculated=1)

    # ---- taking back ------------------------------------------------------------------------------------------

    def end(self, bucket: Bucket) -> None:
        """Waits for a speculated step. Workers have undone it if it failed or its journal overflowed."""
        if not self._executor.wait(bucket):
            self._mark_undone(bucket)
        elif bucket.work.overflowed:
            self._stats.add(journal_overflows=1)
            bucket.journal_width.learn_from_overflow(bucket.work, bucket.next_step())
            self._mark_undone(bucket)

    def end_all(self) -> None:
        """Waits for all speculated buckets; their journals show which width fits next time."""
        self._journaled_numel = self._journaled_bytes = 0
        for bucket in self._layout.buckets:
            if bucket.state is not BucketState.SPECULATED:
                continue
            self.end(bucket)
            if bucket.state is BucketState.SPECULATED:
                use = bucket.work.journal_use()
                bucket.journal_width.learn_from_use(use, bucket.numel, bucket.work.journal_capacity)
                self._journaled_numel += bucket.numel
                self._journaled_bytes += use.bytes

    def count_journals(self) -> None:
        """Counts the journals that ``end_all()`` has seen, since the step is not skipped."""
        self._stats.add(journal_bytes=self._journaled_bytes)
        if self._journaled_numel:
            self._stats.set(journal_bytes_per_param=self._journaled_bytes / self._journaled_numel)

    def undo(self, bucket: Bucket) -> None:
        """Makes a speculated bucket ready again, with the same packed gradient."""
        if bucket.state is not BucketState.SPECULATED:
            return
        self.end(bucket)
        if bucket.state is BucketState.SPECULATED:
            self._executor.submit(bucket, _native.Operation.undo)
            self._executor.wait(bucket)
            self._mark_undone(bucket)

    def undo_all(self) -> int:
        """Undoes all speculated buckets at the same time; returns how many. Their state stays SPECULATED."""
        undone = []
        for bucket in self._layout.buckets:
            if bucket.state is BucketState.SPECULATED:
                self.end(bucket)
            if bucket.state is BucketState.SPECULATED:
                self._executor.submit(bucket, _native.Operation.undo)
                undone.append(bucket)
        for bucket in undone:
            self._link.unstage(bucket)
            self._executor.wait(bucket)
        return len(undone)

    def withdraw(self) -> None:
        """Takes back operations that no worker has begun, since a journal no longer pays for them. Not on the host,
        where the model computes on the same processors, so that few operations wait at a verdict."""
        if not self._link.asynchronous:
            return
        for bucket in reversed(self._layout.buckets):
            if bucket.state is BucketState.SPECULATED and self._executor.withdraw(bucket):
                self._mark_undone(bucket)

    def _mark_undone(self, bucket: Bucket) -> None:
        self._link.unstage(bucket)
        bucket.move(BucketState.UNDONE)
        self._stats.add(buckets_undone=1)
        bucket.move(BucketState.FILLING)
        bucket.move(BucketState.READY)

    def end_step(self) -> None:
        self._speculating = True
