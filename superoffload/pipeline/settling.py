"""The second phase of two-phase steps: masters and moments follow the published parameters, behind the next forward.

A published bucket has its new parameters in the shadow and its old masters and moments; its packed gradient and its
frozen scalars stay as they are until the worker threads have settled it. Everything that reads or writes masters,
moments or that gradient settles first.
"""

from __future__ import annotations

from collections.abc import Callable

from superoffload import _native
from superoffload.bucket import Bucket, BucketState, GroupHyper, Shard
from superoffload.errors import WorkerError
from superoffload.link import Link
from superoffload.pipeline.delivering import Delivering
from superoffload.pipeline.options import CoreOptions


class Settling(Delivering):
    """What a two-phase step has left to be settled."""

    def __init__(self, link: Link, options: CoreOptions, hyper_of: Callable[[int], GroupHyper]) -> None:
        super().__init__(link, options, hyper_of)
        self._settling: dict[Bucket, _native.Completion] = {}  # in backward order
        self._failed_before: WorkerError | None = None  # of a step that was completed: told by the next call

    @property
    def is_settling(self) -> bool:
        """Whether masters and moments of some bucket may still be those before the last step."""
        return bool(self._settling)

    def _settle_behind(self) -> None:
        """Submits the settles of what was just published: in backward order, since that is when each must be done."""
        for bucket in self.buckets:
            if bucket.state is BucketState.PUBLISHED:
                self._settling[bucket] = self.pool.submit(bucket.work, _native.Operation.settle, 1, bucket.running)

    def settle(self, shard: Shard | None = None) -> None:
        """Until masters and moments of ``shard``, or of all, are those of the last step.

        A worker that failed there has completed its bucket; the next call that ends or interrupts a step says so.
        """
        if not (self._settling or self._landing):
            return
        buckets = self.buckets if shard is None else self._buckets_of(shard)
        unsettled = [bucket for bucket in buckets if bucket in self._settling]
        stepped = [bucket for bucket in buckets if bucket in self._landing and bucket.running is not None]
        if not (unsettled or stepped):
            return
        with self._caller_at_work():
            for bucket in stepped:
                self._wait(bucket)
            for bucket in unsettled:
                self._wait_for_settle(bucket)
                del self._settling[bucket]
                bucket.move(BucketState.SETTLED)
                if bucket not in self._landing:
                    bucket.renew()

    def _finish_before(self, shard: Shard | None = None) -> None:
        """The step before is delivered and settled, as far as ``shard`` goes. Raises nothing: the caller has begun
        something else, and tells at the end of it what had failed."""
        try:
            self.land(shard)
        except WorkerError as error:
            self._failed_before = self._failed_before or type(error)(f"{error} (the step before was completed)")
        self.settle(shard)

    def _wait_for_settle(self, bucket: Bucket) -> None:
        settled = self._settling[bucket]
        try:
            settled.wait()
        except RuntimeError as error:
            self._failed_before = self._failed_before or WorkerError(f"{error} (the step before was completed)")
            return
        if settled.began > 0:
            self.policy.worked(_native.Operation.settle, bucket.numel, settled.ended - settled.began)

    def _raise_failure(self) -> None:
        if self._failure is None:
            self._failure, self._failed_before = self._failed_before, None
        self._raise_worker_failure()
