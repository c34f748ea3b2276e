"""After the verdict, buckets are committed, replayed, stepped or published; then delivered, and settled later.

A delivery copies a shadow to the model's parameters, by the end of the step or later, shard by shard. A settle is the
second phase of a two-phase step: masters and moments follow the published parameters, behind the next forward. A
published bucket has new parameters in its shadow, but old masters and moments. Its packed gradient and its frozen
scalars stay as they are until the worker threads have settled it. Settle before you read or write masters, moments or
that gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from superoffload import _native
from superoffload.engine.bucket import Bucket, BucketState, Shard
from superoffload.engine.executor import Executor
from superoffload.engine.layout import Layout
from superoffload.engine.options import Listener, Recorder
from superoffload.engine.schedule import Schedule, Situation
from superoffload.engine.snapshot import Snapshots
from superoffload.engine.speculator import Speculator
from superoffload.engine.stats import Stats
from superoffload.errors import DeviceError, SuperOffloadError, TornStep, WorkerError
from superoffload.links.base import Link


@dataclass(eq=False, repr=False)
class Finisher:
    """Ends the step of buckets, with the factor that multiplies every gradient element."""

    _link: Link
    _layout: Layout
    _speculator: Speculator
    _executor: Executor
    _schedule: Schedule
    _snapshots: Snapshots
    _stats: Stats
    _may_settle_later: bool

    def __post_init__(self) -> None:
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
            self._run(bucket, factor, _native.Operation.replay, BucketState.REPLAYED)
            self._stats.add(buckets_replayed=1)
        elif bucket in self._in_two_phases and bucket.work.take_halves():
            self._snapshots.protect(piece.shard for piece in bucket.pieces)
            self._run(bucket, factor, _native.Operation.publish, BucketState.PUBLISHED)
            self._stats.add(buckets_two_phase=1)
        else:
            self._snapshots.protect(piece.shard for piece in bucket.pieces)
            self._run(bucket, factor, _native.Operation.step, BucketState.STEPPED)
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


@dataclass(eq=False, repr=False)
class LastStep:
    """Owns the deliveries and settles that the last step has left, and waits for them."""

    _link: Link
    _layout: Layout
    _executor: Executor
    _schedule: Schedule
    _listener: Listener
    _recorder: Recorder

    def __post_init__(self) -> None:
        self.undelivered: dict[Bucket, None] = {}  # in forward order
        self._copies: dict[Bucket, _native.Completion] = {}  # deliveries under way
        self.unsettled: dict[Bucket, _native.Completion] = {}  # in backward order
        self._failed: SuperOffloadError | None = None  # of a step that was completed: told by the next call

    def holds(self, bucket: Bucket) -> bool:
        """Returns whether ``bucket`` is still to be delivered or settled."""
        return bucket in self.undelivered or bucket in self.unsettled

    def take(self, buckets: Sequence[Bucket]) -> None:
        """Takes stepped buckets, in forward order, to deliver them, and to settle those that were only published."""
        self._settle_behind()
        self.undelivered = dict.fromkeys(buckets)

    def _settle_behind(self) -> None:
        """Submits the settles of published buckets, in backward order, as the next backward needs them."""
        for bucket in self._layout.buckets:
            if bucket.state is BucketState.PUBLISHED:
                settle = self._executor.pool.submit(bucket.work, _native.Operation.settle, 1, bucket.running)
                self.unsettled[bucket] = settle

    def finish(self, shard: Shard | None = None) -> None:
        """Delivers and settles the step before, for ``shard`` or for all. Keeps a failure, which the caller raises
        after its own work."""
        if not (self.undelivered or self.unsettled):
            return
        try:
            self.land(shard)
        except WorkerError as error:
            self._keep(type(error)(f"{error} (the step before was completed)"))
        self.settle(shard)

    def take_failure(self) -> SuperOffloadError | None:
        """Forgets the failure of the step before and returns it, for the caller to raise."""
        failed, self._failed = self._failed, None
        return failed

    def _keep(self, error: SuperOffloadError) -> None:
        self._failed = self._failed or error

    # ---- delivery ---------------------------------------------------------------------------------------------

    @property
    def is_landing(self) -> bool:
        """Returns whether any bucket is not delivered yet."""
        return bool(self.undelivered)

    def is_landing_any(self, shards: Iterable[Shard]) -> bool:
        """Returns whether any of these shards is not delivered wholly yet."""
        return any(bucket in self.undelivered for shard in shards for bucket, _ in self._layout.places_of(shard))

    def landing_shards(self) -> dict[int, Shard]:
        """Returns the shards that are not delivered wholly yet, by index, in forward order."""
        return {piece.shard.index: piece.shard for bucket in self.undelivered for piece in bucket.stepped_pieces()}

    def land(self, shards: Shard | Iterable[Shard] | None = None) -> None:
        """Waits for and delivers the undelivered buckets: those of ``shards``, or all."""
        if not self.undelivered:
            return
        buckets = list(self.undelivered)
        if shards is not None:
            several = [shards] if isinstance(shards, Shard) else shards
            wanted = {bucket for shard in several for bucket in self._layout.buckets_of(shard)}
            buckets = [bucket for bucket in buckets if bucket in wanted]
        if buckets:
            with self._executor.caller_at_work():
                self._land(buckets)
                self._executor.raise_failure()

    def land_staged(self) -> None:
        """Delivers what went up before the verdict. It is a copy on the device, and frees memory that the next forward
        would have to do without."""
        staged = [bucket for bucket in self.undelivered if self._link.has_staged(bucket)]
        if staged:
            self._hand_over(staged)  # the step that is ending renews and records them

    def _land(self, buckets: Sequence[Bucket]) -> None:
        began = _native.now_seconds()
        try:
            self._hand_over(buckets)
        finally:
            landed = [bucket for bucket in buckets if bucket not in self.undelivered]
            self._recorder.landed(landed, began)
            for bucket in landed:
                if bucket.state is not BucketState.PUBLISHED:
                    bucket.renew()

    def _hand_over(self, buckets: Sequence[Bucket]) -> None:
        try:
            self._listener.landing(buckets)
            self.deliver(buckets)
        finally:
            error = self._listener.landed([bucket for bucket in buckets if bucket not in self.undelivered])
            if error is not None:
                self._executor.fail_first(error)

    def deliver(self, buckets: Sequence[Bucket]) -> None:
        """Waits for ``buckets`` and delivers them."""
        self.send_up(buckets)
        for bucket in buckets:
            self._executor.wait(bucket)
            self._end_delivery(bucket)
            del self.undelivered[bucket]

    def send_up(self, buckets: Sequence[Bucket]) -> None:
        """Starts deliveries in forward order, each as soon as its bucket is done. An asynchronous link waits itself."""
        for bucket in buckets:
            if bucket in self._copies:
                continue
            if not self._link.asynchronous:
                self._executor.wait(bucket)
            after = bucket.running or _native.Completion.already_done()
            try:
                self._copies[bucket] = self._link.deliver(bucket, after)
            except DeviceError as error:  # raised once all other buckets are delivered
                failed = self._copies[bucket] = _native.Completion()
                failed.fail(str(error))

    def _end_delivery(self, bucket: Bucket) -> None:
        """Waits until the copy was made or enqueued, and has streams wait for it."""
        copy = self._copies.pop(bucket, None)
        try:
            if copy is not None:
                copy.wait()
            self._link.make_visible(bucket)
        except RuntimeError as error:
            self._executor.fail(DeviceError(str(error)))

    # ---- settles ----------------------------------------------------------------------------------------------

    @property
    def is_settling(self) -> bool:
        """Returns whether masters and moments of some bucket may still be those before the last step."""
        return bool(self.unsettled)

    def settle(self, shard: Shard | None = None) -> None:
        """Waits until masters and moments of ``shard``, or of all, are those of the last step.

        A worker that failed has completed its bucket; the next call that ends or interrupts a step raises the failure.
        """
        if not (self.unsettled or self.undelivered):
            return
        buckets = self._layout.buckets if shard is None else self._layout.buckets_of(shard)
        unsettled = [bucket for bucket in buckets if bucket in self.unsettled]
        stepped = [bucket for bucket in buckets if bucket in self.undelivered and bucket.running is not None]
        if not (unsettled or stepped):
            return
        with self._executor.caller_at_work():
            for bucket in stepped:
                self._executor.wait(bucket)
            for bucket in unsettled:
                self._wait_for_settle(bucket)
                del self.unsettled[bucket]
                bucket.move(BucketState.SETTLED)
                if bucket not in self.undelivered:
                    bucket.renew()

    def _wait_for_settle(self, bucket: Bucket) -> None:
        settled = self.unsettled[bucket]
        try:
            settled.wait()
        except RuntimeError as error:
            self._keep(WorkerError(f"{error} (the step before was completed)"))
            return
        if settled.began > 0:
            self._schedule.times.worked(_native.Operation.settle, bucket.numel, settled.ended - settled.began)
