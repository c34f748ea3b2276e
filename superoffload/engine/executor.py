"""Work on buckets is handed to the worker threads, timed and waited for; failures are kept until they are raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import cache

from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import Bucket, GroupHyper
from superoffload.engine.options import Pool
from superoffload.engine.schedule import Schedule
from superoffload.errors import SuperOffloadError, WorkerError
from superoffload.links.base import Link, PackTicket


@dataclass(eq=False, repr=False)
class Executor:
    """Owns the worker threads, the hyper-parameters of this step, and the first failure until it is raised.

    Failures are kept so that everything is put in order before one is raised. ``hyper``: hyper-parameters of a group,
    by its number, read and checked once, until ``forget_hypers()``.
    """

    _link: Link
    pool: Pool
    _schedule: Schedule
    hyper_of: InitVar[Callable[[int], GroupHyper]]
    _clock: Callable[[], float]

    def __post_init__(self, hyper_of: Callable[[int], GroupHyper]) -> None:
        self.stopwatch = Stopwatch(self._clock)
        self.hyper = cache(hyper_of)
        self.exposed_seconds = 0.0  # of the training thread, since construction
        self.failure: SuperOffloadError | None = None  # the first one that was not raised yet

    # ---- hyper-parameters -------------------------------------------------------------------------------------

    def forget_hypers(self) -> None:
        """Has hyper-parameters read anew, since they may have changed."""
        self.hyper.cache_clear()

    def freeze(self, bucket: Bucket, factor: float) -> None:
        """Fixes the scalars that ``bucket`` is stepped with; its group may change afterwards."""
        bucket.freeze(self.hyper(bucket.group), factor)

    # ---- work -------------------------------------------------------------------------------------------------

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        """The link packs these gradients of ``bucket``, one per piece."""
        with self.caller_at_work():
            ticket = self._link.pack(bucket, grads)
        self.stopwatch.packed(ticket.completion)
        return ticket

    def submit(self, bucket: Bucket, operation: _native.Operation) -> None:
        """Hands ``operation`` to the worker threads, which begin once the gradient of ``bucket`` has arrived."""
        bucket.run(operation, self.pool.submit)

    def withdraw(self, bucket: Bucket) -> bool:
        """Takes back the operation on ``bucket``; returns False if a worker has begun it."""
        if bucket.running is None or not self.pool.withdraw(bucket.running):
            return False
        bucket.running, bucket.doing = bucket.arrival, None  # the gradient may still be on its way
        bucket.why_not_speculated = "no worker thread had begun it by the verdict, or when a clip was certain"
        return True

    def wait(self, bucket: Bucket) -> bool:
        """Waits for the operation on ``bucket``; returns False, and keeps the failure, if a worker failed."""
        running, doing = bucket.running, bucket.doing
        if running is None:
            return True
        try:
            running.wait()
        except RuntimeError as error:
            bucket.running = bucket.doing = None
            self.fail(WorkerError(str(error)))
            return False
        if doing is not None and running.began > 0:
            self._schedule.times.worked(doing, bucket.numel, running.ended - running.began)
        bucket.running = bucket.doing = None
        return True

    # ---- failures ---------------------------------------------------------------------------------------------

    def fail(self, error: SuperOffloadError) -> None:
        """Keeps ``error`` unless there is an earlier one."""
        self.failure = self.failure or error

    def fail_first(self, error: SuperOffloadError) -> None:
        """Keeps ``error``; an earlier one becomes its cause."""
        error.__cause__, self.failure = self.failure, error

    def take_failure(self) -> SuperOffloadError | None:
        """Forgets the failure and returns it, for the caller to raise."""
        failure, self.failure = self.failure, None
        return failure

    def raise_failure(self) -> None:
        """Raises the failure if there is one."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    # ---- time -------------------------------------------------------------------------------------------------

    @contextmanager
    def caller_at_work(self) -> Iterator[None]:
        """Counts the training thread's time in this context as exposed optimizer time."""
        self.pool.enter()
        began = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            self.exposed_seconds += ended - began
            self.stopwatch.held_up(began, ended)
            self.pool.leave()

    def close(self) -> None:
        """Ends the worker threads. Idempotent."""
        self.pool.close()


class Stopwatch:
    """Measures how long the model computes: forward and backward, without the time that the optimizer held them up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None  # when what is measured now began: forward, or backward
        self.held_up_so_far = 0.0  # seconds since then in which the training thread was ours
        self._forward: float | None = None  # of this step, once its first gradient is there
        self._first: _native.Completion | None = None
        self._last: _native.Completion | None = None
        self._first_at = 0.0
        self._packed = 0

    def held_up(self, began: float, ended: float) -> None:
        """Notes that the optimizer used the training thread, or had it wait, from ``began`` to ``ended``."""
        if self._since is not None:
            self.held_up_so_far += max(0.0, ended - max(began, self._since))

    def step_ended(self) -> None:
        """Starts timing the next forward."""
        self._start()
        self._forward = self._first = self._last = None
        self._packed = 0

    def gradient(self) -> None:
        """Notes that a gradient arrives in backward: the first one ends forward."""
        if self._since is not None and self._forward is None:
            self._first_at = self._clock()
            self._forward = self._first_at - self._since - self.held_up_so_far
            self._start()

    def packed(self, arrival: _native.Completion) -> None:
        """Notes the arrival of a bucket's gradient in host memory, which may still be to come."""
        self._first = self._first or arrival
        self._last = arrival
        self._packed += 1

    def computed(self, deciding: float, held_up: float) -> tuple[float, float] | None:
        """Returns the seconds of forward and backward of this step; None without a step before, or without backward.

        ``deciding``: when the end of the step was asked for; ``held_up``: ``held_up_so_far`` then. All gradients have
        arrived. Where a device is behind the training thread, the arrivals show when it really computed.
        """
        if self._since is None or self._forward is None or self._packed == 0:
            return None
        late_first, late_last = _after(self._first, self._first_at), _after(self._last, deciding)
        forward = self._forward + late_first
        backward = deciding - self._since - held_up + late_last - late_first
        # The first of them came after its share of backward.
        share = max(0.0, backward) / (self._packed - 1) if self._packed > 1 else max(0.0, forward) * 2 / 3
        return max(0.0, forward - share), max(0.0, backward) + share

    def _start(self) -> None:
        self._since, self.held_up_so_far = self._clock(), 0.0


def _after(arrival: _native.Completion | None, moment: float) -> float:
    """Returns the seconds by which a gradient arrived after ``moment``."""
    return max(0.0, arrival.ended - moment) if arrival is not None and arrival.ended > 0 else 0.0
