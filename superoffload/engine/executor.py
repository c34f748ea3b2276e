"""Work on buckets: handed to the worker threads and waited for; whose failure it was, and how long it took."""

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
    """Owns the worker threads, what buckets are stepped with, and the first failure until it is raised.

    Failures are kept so that everything is put in order before one is raised.
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
        self._hypers: dict[int, GroupHyper] = {}  # of groups, as they were read in this step
        self._failure: SuperOffloadError | None = None

    # ---- what buckets are stepped with ------------------------------------------------------------------------

    def hyper(self, group: int) -> GroupHyper:
        """Hyper-parameters of ``group``: read and checked once, until ``forget_hypers()``."""
        hyper = self._hypers.get(group)
        if hyper is None:
            hyper = self._hypers[group] = self._hyper_of(group)
        return hyper

    def forget_hypers(self) -> None:
        """They may have changed since."""
        self._hypers.clear()

    def freeze(self, bucket: Bucket, factor: float) -> None:
        """Fixes the scalars that ``bucket`` is stepped with; those of its group may change afterwards."""
        bucket.freeze(self.hyper(bucket.group), factor)

    # ---- work -------------------------------------------------------------------------------------------------

    def submit(self, bucket: Bucket, operation: _native.Operation, width: int = 1) -> None:
        """Runs ``operation`` behind what runs on ``bucket``, if that is its gradient on the way."""
        bucket.runs(operation, self.pool.submit(bucket.work, operation, width, bucket.running))

    def withdraw(self, bucket: Bucket) -> bool:
        """Takes back the operation on ``bucket`` if no worker has begun it. False: too late."""
        if bucket.running is None or not self.pool.withdraw(bucket.running):
            return False
        bucket.is_withdrawn()
        return True

    def wait(self, bucket: Bucket) -> bool:
        """Waits for what runs on ``bucket``. False: a worker failed; the failure is kept."""
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
        """The first one that was not raised yet."""
        return self._failure

    def fail(self, error: SuperOffloadError) -> None:
        """Keeps ``error`` unless there is an earlier one."""
        self._failure = self._failure or error

    def fail_first(self, error: SuperOffloadError) -> None:
        """Keeps ``error``; an earlier one becomes its cause."""
        error.__cause__, self._failure = self._failure, error

    def take_failure(self) -> SuperOffloadError | None:
        """The failure, which is the caller's to raise."""
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
        """Time of the training thread spent here is optimizer time, and exposed."""
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
