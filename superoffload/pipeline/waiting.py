"""Handing work to the worker threads and waiting for it: whose failure it was, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from superoffload import _native
from superoffload.bucket import Bucket, GroupHyper
from superoffload.errors import SuperOffloadError, WorkerError
from superoffload.link import Link
from superoffload.pipeline.layout import Layout
from superoffload.pipeline.options import CoreOptions
from superoffload.pipeline.stopwatch import Stopwatch
from superoffload.stats import Stats

# beta ** step is 0 in double precision from here on, so that 1 - beta ** step, the bias correction, is 1.
_CORRECTED_BY_ONE = 1 << 60


class Waiting(Layout):
    """Failures of workers are collected, so that everything is put in order before one is raised."""

    def __init__(self, link: Link, options: CoreOptions, hyper_of: Callable[[int], GroupHyper]) -> None:
        super().__init__(link, options, hyper_of)
        self._hypers: dict[int, GroupHyper] = {}  # of groups, as they were read in this step
        self._stats = Stats()
        self._failure: SuperOffloadError | None = None
        self._stopwatch = Stopwatch(options.clock)

    def _submit(self, bucket: Bucket, operation: _native.Operation, width: int = 1) -> None:
        """Behind what runs on ``bucket``, if that is its gradient on the way."""
        bucket.running = self.pool.submit(bucket.work, operation, width, bucket.running)
        bucket.doing = operation

    def _hyper(self, group: int) -> GroupHyper:
        """Read and checked when the first bucket of ``group`` is speculated, and anew with the verdict."""
        hyper = self._hypers.get(group)
        if hyper is None:
            hyper = self._hypers[group] = self._hyper_of(group)
        return hyper

    def _freeze(self, bucket: Bucket, factor: float) -> None:
        """Fixes the scalars that ``bucket`` is stepped with; those of its group may change afterwards."""
        hyper = self._hyper(bucket.group)
        ahead = 1 if hyper.bias_correction else _CORRECTED_BY_ONE
        steps = [
            piece.shard.steps + ahead if present else 0
            for piece, present in zip(bucket.pieces, bucket.present, strict=True)
        ]
        work = bucket.work if bucket.resident_work is None else bucket.resident_work
        work.freeze(
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            gradient_factor=factor,
            l2=hyper.l2,
            steps=steps,
        )
        bucket.frozen = hyper
        bucket.factor = factor

    def _wait(self, bucket: Bucket) -> bool:
        """For the operation that runs on ``bucket``. False: a worker failed (see ``_raise_worker_failure``)."""
        running = bucket.running
        if running is None:
            return True
        try:
            running.wait()
        except RuntimeError as error:
            bucket.running = bucket.doing = None
            self._failure = self._failure or WorkerError(str(error))
            return False
        if bucket.doing is not None and running.began > 0:
            self.policy.worked(bucket.doing, bucket.numel, running.ended - running.began)
        bucket.running = bucket.doing = None
        return True

    def _raise_worker_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @contextmanager
    def _caller_at_work(self) -> Iterator[None]:
        """Time of the training thread spent here is optimizer time, and exposed."""
        self.pool.enter()
        began = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            self._stats.optimizer_seconds_exposed += ended - began
            self._stopwatch.held_up(began, ended)
            self.pool.leave()
