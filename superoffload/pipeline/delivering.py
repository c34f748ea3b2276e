"""Delivery: from the shadows to the model's parameters, by the end of the step or later, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from superoffload import _native
from superoffload.bucket import Bucket, BucketState, GroupHyper, Shard
from superoffload.errors import DeviceError
from superoffload.link import Link
from superoffload.pipeline.options import CoreOptions
from superoffload.pipeline.waiting import Waiting


class Delivering(Waiting):
    """What a step has left to be delivered, and who waits for it."""

    def __init__(self, link: Link, options: CoreOptions, hyper_of: Callable[[int], GroupHyper]) -> None:
        super().__init__(link, options, hyper_of)
        self._landing: dict[Bucket, None] = {}  # stepped by apply(later=True), not delivered yet; in forward order

    @property
    def is_landing(self) -> bool:
        """Whether anything that ``apply(later=True)`` has left is not delivered yet."""
        return bool(self._landing)

    def landing_shards(self) -> dict[int, Shard]:
        """Those that are not delivered wholly yet, by index, in forward order."""
        return {piece.shard.index: piece.shard for bucket in self._landing for piece in bucket.stepped_pieces()}

    def land(self, shards: Shard | Iterable[Shard] | None = None) -> None:
        """Waits for and delivers what ``apply(later=True)`` left running: the buckets of ``shards``, or all of them."""
        if not self._landing:
            return
        buckets = list(self._landing)
        if shards is not None:
            several = [shards] if isinstance(shards, Shard) else shards
            wanted = {bucket for shard in several for bucket in self._buckets_of(shard)}
            buckets = [bucket for bucket in buckets if bucket in wanted]
        if buckets:
            with self._caller_at_work():
                self._land(buckets)
                self._raise_worker_failure()

    def _land(self, buckets: Sequence[Bucket]) -> None:
        began = _native.now_seconds()
        try:
            self.listener.landing(buckets)
            self._deliver(buckets)
        finally:
            landed = [bucket for bucket in buckets if bucket not in self._landing]
            error = self.listener.landed(landed)
            if error is not None:
                error.__cause__, self._failure = self._failure, error
            if self.timeline is not None:
                self.timeline.landed(landed, began)
            for bucket in landed:
                if bucket.state is not BucketState.PUBLISHED:
                    bucket.renew()

    def _deliver(self, buckets: Sequence[Bucket]) -> None:
        self._send_up(buckets)
        for bucket in buckets:
            self._wait(bucket)
            self._end_delivery(bucket)
            del self._landing[bucket]

    def _send_up(self, buckets: Sequence[Bucket]) -> None:
        """In forward order, each bucket as soon as it is done; an asynchronous link waits for that itself."""
        for bucket in buckets:
            if bucket.delivery is not None:
                continue
            if not self.link.asynchronous:
                self._wait(bucket)
            after = bucket.running or _native.Completion.already_done()
            try:
                bucket.delivery = self.link.deliver(bucket, after)
            except DeviceError as error:  # raised once all the others have been seen to, too
                bucket.delivery = _native.Completion()
                bucket.delivery.fail(str(error))

    def _end_delivery(self, bucket: Bucket) -> None:
        """Waits until streams can wait for the copy (or, on the host, until it was made), and lets them."""
        delivery, bucket.delivery = bucket.delivery, None
        try:
            if delivery is not None:
                delivery.wait()
            self.link.make_visible(bucket)
        except RuntimeError as error:
            self._failure = self._failure or DeviceError(str(error))
