"""Before the verdict, buckets are speculated, or it is noted why not; and undone where that was wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

from superoffload import _native
from superoffload.engine.bucket import Bucket, BucketState
from superoffload.engine.executor import Executor
from superoffload.engine.inbox import Inbox
from superoffload.engine.layout import Layout
from superoffload.engine.schedule import Schedule
from superoffload.engine.snapshot import Snapshots
from superoffload.engine.stats import Stats
from superoffload.links.base import Link

_CHOSEN = "speculation='{}' chose to wait"


@dataclass(eq=False, repr=False)
class Speculator:
    """Speculates packed buckets, each with a journal, and undoes them."""

    _link: Link
    _layout: Layout
    _inbox: Inbox
    _executor: Executor
    _schedule: Schedule
    _snapshots: Snapshots
    _stats: Stats

    def __post_init__(self) -> None:
        self.norm = PartialNorm(self._inbox.unfinished)
        self.speculated = 0  # buckets, since construction
        self.held: str | None = None  # a shard whose state a program holds, so that its bucket was not speculated
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
            # A larger square certainly clips by verdict.decide(). Here 1e-6 is a margin for rounding, there a part of
            # the formula. norm ** 2 would raise OverflowError instead of giving inf.
            self._proves_clip = norm * norm * (1 + 1e-6)

    def take_packed(self, bucket: Bucket, *, in_backward: bool) -> None:
        """``bucket`` was packed: its squares count, and in backward it may be speculated."""
        self.norm.wait_for(bucket)
        if in_backward:
            self.consider(bucket)
        else:
            never = self._schedule.mode == "never"
            bucket.why_not_speculated = _CHOSEN.format("never") if never else "its gradients were taken in step()"

    def count_anew(self, buckets: Iterable[Bucket]) -> None:
        """What is packed of these has changed: their squares count anew."""
        for bucket in buckets:
            self.norm.forget(bucket)
            if bucket.state is BucketState.READY and bucket.arrival is not None:
                self.norm.wait_for(bucket)

    def consider(self, bucket: Bucket) -> None:
        """Steps a packed bucket with a journal, unless there is a reason to wait for the verdict, which it notes."""
        bucket.why_not_speculated = self._speculate(bucket)
        if bucket.why_not_speculated is not None:
            self.held = bucket.held or self.held
            return
        if self._link.asynchronous:
            assert bucket.running is not None
            self._link.stage(bucket, bucket.running)
        self.speculated += 1

    def _speculate(self, bucket: Bucket) -> str | None:
        """Has worker threads step ``bucket`` now, and returns None; else why it waits."""
        inbox = self._inbox
        if not inbox.unfinished.isdisjoint(bucket.indices):
            return "more gradients of it are expected"
        if self._speculating:
            # Early stop: a non-finite gradient, or the part of the norm that is known already proves a clip.
            self._speculating = self.norm.look() < self._proves_clip
            if not self._speculating:
                self.withdraw()
        if not self._speculating:
            return "the gradients so far prove that the step will be clipped or skipped"
        numel = inbox.numel_whole() if inbox.unfinished else inbox.numel_packed
        if not self._schedule.should_speculate(numel / self._layout.numel):
            return _CHOSEN.format(self._schedule.mode)
        if bucket.resident:
            return "its state is on the accelerator"
        protect = self._snapshots.protect if self._snapshots.open else None
        return bucket.speculate(self._executor.hyper, self._unscale, self._executor.pool.submit, protect)

    # ---- taking back ------------------------------------------------------------------------------------------

    def end(self, bucket: Bucket) -> None:
        """Waits for a speculated step. Workers have undone it if it failed or its journal overflowed."""
        if not self._executor.wait(bucket):
            self._mark_undone(bucket)
        elif bucket.work.overflowed:
            self._stats.add(journal_overflows=1)
            bucket.journal_width.learn_from_overflow(bucket.next_step())
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
                bucket.journal_width.learn_from_use(use, bucket.numel)
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
            bucket.publish_restored()
        return len(undone)

    def withdraw(self) -> None:
        """Takes back operations that no worker has begun, since a journal no longer pays for them. Not on the host,
        where the model computes on the same processors, so that few operations wait at a verdict."""
        if not self._link.asynchronous:
            return
        for bucket in reversed(self._layout.buckets):
            if bucket.state is BucketState.SPECULATED and self._executor.withdraw(bucket):
                self._mark_undone(bucket)
                self._stats.add(buckets_withdrawn=1)

    def _mark_undone(self, bucket: Bucket) -> None:
        self._link.unstage(bucket)
        bucket.publish_restored()
        bucket.work.release_journal()
        bucket.move(BucketState.UNDONE)
        bucket.why_not_speculated = bucket.why_not_speculated or "it was stepped and undone"
        self._stats.add(buckets_undone=1)
        bucket.move(BucketState.FILLING)
        bucket.move(BucketState.READY)

    def end_step(self) -> None:
        self._speculating = True
        self.norm.clear()


class PartialNorm:
    """Sums the squares of packed gradients as they reach host memory, for an early stop of speculation.

    ``unfinished``: shards, by index, that more is expected to be added to.
    """

    def __init__(self, unfinished: Set[int]) -> None:
        self.squares = 0.0  # of what was looked at
        self._unfinished = unfinished
        self._known: dict[Bucket, float] = {}
        self._waiting: dict[Bucket, _native.Completion] = {}  # packed, and not looked at yet

    def wait_for(self, bucket: Bucket) -> None:
        """The sums of ``bucket``, which was packed, are there once its gradient has arrived."""
        assert bucket.arrival is not None
        self._waiting[bucket] = bucket.arrival

    def forget(self, bucket: Bucket) -> None:
        """Takes ``bucket`` out of the sum, since its packed gradient changes."""
        self._waiting.pop(bucket, None)
        if self._known.pop(bucket, None) is not None:
            self.squares = sum(self._known.values())

    def look(self) -> float:
        """Returns the sum of squares of all buckets that have arrived by now."""
        for bucket, arrival in list(self._waiting.items()):
            if not arrival.done() or arrival.error or not self._unfinished.isdisjoint(bucket.indices):
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
    return sum(_native.fold_sums([piece.sums for piece in bucket.stepped_pieces()]))
