"""Work on buckets is handed to the worker threads, timed and waited for; failures are kept until they are raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from superoffload import _native
from superoffload.engine.bucket import Bucket, GroupHyper
from superoffload.engine.engine_options import Pool
from superoffload.engine.schedule import Schedule
from superoffload.engine.stats import Stats
from superoffload.engine.stopwatch import Stopwatch
from superoffload.errors import SuperOffloadError, WorkerError


class Executor:
    """Owns the worker threads, the hyper-parameters of this step, and the first failure until it is raised.

    A failure is kept so that the step can be ended properly before it is raised.
    """

    def __init__(
        self,
        pool: Pool,
        schedule: Schedule,
        hyper_of: Callable[[int], GroupHyper],
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.stopwatch = Stopwatch(clock)
        self._schedule = schedule
        self._hyper_of = hyper_of
        self._stats = stats
        self._clock = clock
        self._hypers: dict[int, GroupHyper] = {}  # by group, as read in this step
        self._failure: SuperOffloadError | None = None

    # ---- hyper-parameters -------------------------------------------------------------------------------------

    def hyper(self, group: int) -> GroupHyper:
        """Returns the hyper-parameters of ``group``, which are read and checked once until ``forget_hypers()``."""
        hyper = self._hypers.get(group)
        if hyper is None:
            hyper = self._hypers[group] = self._hyper_of(group)
        return hyper

    def forget_hypers(self) -> None:
        """Has hyper-parameters read anew, since they may have changed."""
        self._hypers.clear()

    def freeze(self, bucket: Bucket, factor: float) -> None:
        """Fixes the scalars that ``bucket`` is stepped with; its group may change afterwards."""
        bucket.freeze(self.hyper(bucket.group), factor)

    # ---- work -------------------------------------------------------------------------------------------------

    def submit(self, bucket: Bucket, operation: _native.Operation, width: int = 1) -> None:
        """Hands ``operation`` to the worker threads, which begin once the gradient of ``bucket`` has arrived."""
        bucket.runs(operation, self.pool.submit(bucket.work, operation, width, bucket.running))

    def withdraw(self, bucket: Bucket) -> bool:
        """Takes back the operation on ``bucket``; returns False if a worker has begun it."""
        if bucket.running is None or not self.pool.withdraw(bucket.running):
            return False
        bucket.is_withdrawn()
        return True

    def wait(self, bucket: Bucket) -> bool:
        """Waits for the operation on ``bucket``; returns False, and keeps the failure, if a worker failed."""
        running, doing = bucket.running, bucket.doing
        if running is None:
            return True
        try:
            running.wait()
        except RuntimeError as error:
            bucket.rests()
            self.fail(WorkerError(str(error)))
            return False
        if doing is not None and running.began > 0:
            self._schedule.worked(doing, bucket.numel, running.ended - running.began)
        bucket.rests()
        return True

    # ---- failures ---------------------------------------------------------------------------------------------

    @property
    def failure(self) -> SuperOffloadError | None:
        """Returns the first failure that was not raised yet."""
        return self._failure

    def fail(self, error: SuperOffloadError) -> None:
        """Keeps ``error`` unless there is an earlier one."""
        self._failure = self._failure or error

    def fail_first(self, error: SuperOffloadError) -> None:
        """Keeps ``error``; an earlier one becomes its cause."""
        error.__cause__, self._failure = self._failure, error

    def take_failure(self) -> SuperOffloadError | None:
        """Forgets the failure and returns it, for the caller to raise."""
        failure, self._failure = self._failure, None
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
            self._stats.add(optimizer_seconds_exposed=ended - began)
            self.stopwatch.held_up(began, ended)
            self.pool.leave()

    def close(self) -> None:
        """Ends the worker threads. Idempotent."""
        self.pool.close()
