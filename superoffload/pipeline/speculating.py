"""Speculation: whether a bucket is stepped before the verdict is known, and how that is taken back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from superoffload import _native
from superoffload.bucket import BLOCK, Bucket, BucketState, GroupHyper, Shard
from superoffload.link import Link
from superoffload.pipeline.options import CoreOptions
from superoffload.pipeline.settling import Settling
from superoffload.policy import choose_width, learn_from_overflow

if TYPE_CHECKING:
    from superoffload.checkpoints.snapshot import Snapshot


class Speculating(Settling):
    """From a packed gradient to a bucket with a journal, and back."""

    def __init__(self, link: Link, options: CoreOptions, hyper_of: Callable[[int], GroupHyper]) -> None:
        super().__init__(link, options, hyper_of)
        self._speculating = True  # for this step: no early stop so far
        self._packed = 0  # elements of buckets that are packed in this step
        self._partial = 0.0  # sum of squares of what has arrived in this step, as far as it was looked at
        self._unsummed: dict[Bucket, _native.Completion] = {}  # packed in this step, not in _partial yet
        self._awaited: set[int] = set()  # shards that more is to be added to, as far as that is known
        self._proves_clip = math.inf
        self._unscale = 1.0
        # States of earlier moments that are still being read; one whose save has been cut off is gone by itself.
        self.snapshots: WeakSet[Snapshot] = WeakSet()

    def expect(self, *, unscale: float, max_grad_norm: float | None) -> None:
        """What the coming verdict will most likely use; speculation is right when it does."""
        self._unscale = unscale
        self._proves_clip = math.inf
        if max_grad_norm is not None and unscale != 0.0:
            norm = max_grad_norm / abs(unscale)
            self._proves_clip = norm * norm * (1 + 1e-6)  # not norm ** 2, which raises where this gives infinity

    def _worth_speculating(self) -> bool:
        if self._speculating:
            self._sum_what_arrived()
            # Early stop: a non-finite gradient, or the part of the norm that is known already proves a clip.
            self._speculating = self._partial < self._proves_clip
            if not self._speculating:
                self._withdraw()
        return self._speculating and self.policy.wants(self._packed_whole() / self._numel)

    def _is_whole(self, bucket: Bucket) -> bool:
        """Whether no more is expected to be added to what has arrived of ``bucket``."""
        return not self._awaited or self._awaited.isdisjoint(piece.shard.index for piece in bucket.pieces)

    def _packed_whole(self) -> int:
        """Elements of buckets that are packed and whole."""
        if not self._awaited:
            return self._packed
        packed = (bucket for bucket in self.buckets if bucket.state is not BucketState.FILLING)
        return sum(bucket.numel for bucket in packed if self._is_whole(bucket))

    def _sum_what_arrived(self) -> None:
        """For the early stop: the block sums of packed gradients that have reached host memory since the last look."""
        for bucket, arrival in list(self._unsummed.items()):
            if not arrival.done() or arrival.error or not self._is_whole(bucket):
                continue
            del self._unsummed[bucket]
            for piece, present in zip(bucket.pieces, bucket.present, strict=True):
                if present:
                    first = piece.start // BLOCK
                    sums = piece.shard.block_sums[first : first + -(-piece.numel // BLOCK)]
                    bucket.squares += float(np.sum(sums))
            self._partial += bucket.squares

    def protect(self, shards: Iterable[Shard]) -> None:
        """Before masters or moments change: whoever reads an earlier state has them, or a copy, when it returns."""
        if not self.snapshots:
            return
        changing = list(shards)
        for snapshot in list(self.snapshots):
            snapshot.protect(changing)
            if snapshot.over:
                self.snapshots.discard(snapshot)

    def _speculate(self, bucket: Bucket) -> None:
        if bucket.resident:  # stepped on the accelerator, after the verdict
            return
        width = choose_width(bucket, self._next_step_of(bucket))
        if width is None:
            return
        self.protect(piece.shard for piece in bucket.pieces)
        bucket.width = width
        self._freeze(bucket, self._unscale)
        self._submit(bucket, _native.Operation.step_journaled, width)
        bucket.move(BucketState.SPECULATED)
        assert bucket.running is not None
        self.link.stage(bucket, bucket.running)
        self._stats.buckets_speculated += 1

    def _next_step_of(self, bucket: Bucket) -> int:
        return 1 + min(p.shard.steps for p, present in zip(bucket.pieces, bucket.present, strict=True) if present)

    def _withdraw(self) -> None:
        """Takes back what waits for a worker: it is not worth a journal any more. Not on the host, where the model
        computes with the same processors, so that little waits when a verdict comes."""
        if not self.link.asynchronous:
            return
        for bucket in reversed(self.buckets):
            running = bucket.running
            if bucket.state is BucketState.SPECULATED and running is not None and self.pool.withdraw(running):
                bucket.running, bucket.doing = bucket.arrival, None
                self._mark_undone(bucket)

    def _end_speculation(self, bucket: Bucket) -> None:
        """Waits for a speculated step; one whose journal overflowed or that failed was undone by the workers."""
        if not self._wait(bucket):
            self._mark_undone(bucket)
        elif bucket.work.overflowed:
            self._stats.journal_overflows += 1
            learn_from_overflow(bucket, bucket.width, self._next_step_of(bucket))
            self._mark_undone(bucket)

    def _mark_undone(self, bucket: Bucket) -> None:
        self.link.unstage(bucket)
        bucket.move(BucketState.UNDONE)
        self._stats.buckets_undone += 1
        bucket.move(BucketState.FILLING)
        bucket.move(BucketState.READY)

    def _undo_one(self, bucket: Bucket) -> None:
        """A speculated bucket becomes ready again, its packed gradient untouched."""
        if bucket.state is not BucketState.SPECULATED:
            return
        self._end_speculation(bucket)
        if bucket.state is BucketState.SPECULATED:
            self._submit(bucket, _native.Operation.undo)
            self._wait(bucket)
            self._mark_undone(bucket)

    def _take_back(self, state: BucketState) -> int:
        """Undoes every speculated bucket and ends the step of all with ``state``; returns how many were undone."""
        undone = []
        for bucket in self.buckets:
            if bucket.state is BucketState.SPECULATED:
                self._end_speculation(bucket)
            if bucket.state is BucketState.SPECULATED:
                self._submit(bucket, _native.Operation.undo)
                undone.append(bucket)
        for bucket in undone:
            self.link.unstage(bucket)
            self._wait(bucket)
        for bucket in self.buckets:
            if bucket.state is not BucketState.FILLING:
                self._wait(bucket)
                bucket.move(state)
        return len(undone)

    def _abandon_step(self) -> None:
        """Ends it with nothing changed. What had failed is the caller's to raise."""
        self._stats.buckets_abandoned += self._take_back(BucketState.ABANDONED)
        self._end_step(whole=False)

    def _end_step(self, *, whole: bool) -> None:
        """Every layer forgets this step. ``whole``: backward ended, so that the order of its gradients is known."""
        if self.timeline is not None:
            self.timeline.end_step(self.buckets)
        for bucket in self.buckets:
            if bucket not in self._landing and bucket.state is not BucketState.PUBLISHED:
                bucket.renew()
        self._stopwatch.step_ended()
        self._hypers.clear()
        self._packed = 0
        self._partial = 0.0
        self._unsummed.clear()
        self._awaited.clear()
        self._speculating = True
        self.link.step_ended(whole=whole)
