"""Emulates worker threads in virtual time: one operation after the other, as long as its bytes take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.emulation.clock import VirtualClock, VirtualCompletion, when_done
from superoffload import _native

Operation = _native.Operation


@dataclass(eq=False)
class _Task:
    work: _native.BucketWork
    operation: Operation
    width: int
    after: _native.Completion | None
    done: VirtualCompletion


class VirtualPool:
    """Replaces ``_native.WorkerPool`` on a virtual clock. ``seconds(operation, numel)``: duration of an operation.

    The kernels really execute the operations. ``at_once()``: whether the next one executes when it begins, or when it
    ends: an early read of what it writes, or a write to what it reads, gives other bits in one of the cases.
    """

    def __init__(
        self,
        clock: VirtualClock,
        seconds: Callable[[Operation, int], float],
        at_once: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._at_once = at_once
        self._queue: list[_Task] = []
        self._running: _Task | None = None
        self._closed = False
        self._fault: tuple[int, str] | None = None
        self._busy, self._busy_since, self._busy_total = 0, 0.0, 0.0
        self.faults = 0  # injected faults that have happened

    def submit(
        self,
        work: _native.BucketWork,
        operation: Operation,
        width: int = 1,
        after: _native.Completion | None = None,
    ) -> VirtualCompletion:
        if self._closed:
            raise RuntimeError("the optimizer is closed")
        task = _Task(work, operation, width, after, VirtualCompletion(self._clock))
        self._queue.append(task)
        when_done(after, self._begin_next)
        return task.done

    def withdraw(self, done: _native.Completion) -> bool:
        for task in self._queue:
            if task.done is done:
                self._queue.remove(task)
                task.done.fail("withdrawn before it began")
                return True
        return False

    def _begin_next(self) -> None:
        if self._running is not None:
            return
        ready = (task for task in self._queue if task.after is None or task.after.done())
        task = next(ready, None)
        if task is None:
            return
        self._queue.remove(task)
        self._running = task
        began = self._clock.now
        self.enter()
        error = self._error_of(task)
        ran = self._at_once()
        if ran:
            self._carry_out(task, error)

        def end() -> None:
            if not ran:
                self._carry_out(task, error)
            self._running = None
            self.leave()
            task.done.times = (began, self._clock.now)
            if error:
                task.done.fail(f"worker thread: {error}")
            else:
                task.done.finish()
            self._begin_next()

        self._clock.at(began + self._seconds(task.operation, task.work.numel), end)

    def _error_of(self, task: _Task) -> str:
        if task.after is not None and task.after.error and task.operation is not Operation.settle:
            return task.after.error
        if self._fault is None:
            return ""
        left, message = self._fault
        self._fault = (left - 1, message) if left > 0 else None
        if left > 0:
            return ""
        self.faults += 1
        return message

    def _carry_out(self, task: _Task, error: str) -> None:
        """Completes what comes after the verdict even if a worker failed; undoes a speculated step."""
        lost = task.after is not None and bool(task.after.error) and task.operation is not Operation.settle
        if lost or (error and task.operation is Operation.step_journaled):
            return
        task.work.run_all(task.operation, task.width)

    def inject_fault(self, chunks_until: int, message: str) -> None:
        self._fault = (chunks_until, message)

    def cancel_fault(self) -> None:
        self._fault = None

    def close(self) -> None:
        """Finishes what can run, fails the rest."""
        self._closed = True
        self._clock.wait_until(lambda: self._running is None)
        for task in self._queue:
            task.done.fail("the optimizer was closed before this ran")
        self._queue.clear()

    def enter(self) -> None:
        if self._busy == 0:
            self._busy_since = self._clock.now
        self._busy += 1

    def leave(self) -> None:
        self._busy -= 1
        if self._busy == 0:
            self._busy_total += self._clock.now - self._busy_since

    @property
    def busy_seconds(self) -> float:
        return self._busy_total + (self._clock.now - self._busy_since if self._busy else 0.0)
