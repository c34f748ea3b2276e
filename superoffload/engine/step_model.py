"""The step model predicts from measured times how long a training step takes; the schedule chooses by it.

It divides the buckets into equal parts that become ready evenly over the last backward and are needed evenly over the
first forward, which begins a step. With gradient accumulation whole micro-batches, which need no new parameters, lie
between the two. The processors do one operation after the other, as the engine submits them: speculated steps during
backward; after the verdict commits, replays, steps and publishes in forward order; then the settles in backward order.
Each settle delays its part's next gradient.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import median

from superoffload import _native

Operation = _native.Operation

# Bytes that each operation moves per parameter with a bf16 gradient and shadow. The time of an operation that was not
# timed yet is estimated in proportion.
BYTES = {
    Operation.step: 28.0,
    Operation.step_journaled: 29.2,
    Operation.replay: 30.4,
    Operation.publish: 16.0,
    Operation.settle: 26.0,
}
_STEPS = 5  # the last steps whose forward and backward count
_SAMPLES = 32  # the last times of an operation that count
_STALE = 64  # steps after which a time no longer counts


class MeasuredTimes:
    """Holds recent times: seconds per element of each operation, seconds of forward and backward.

    "Forward" is all that comes before the last backward: with gradient accumulation the earlier micro-batches too.

    It returns medians, so that a validation run or a checkpoint between steps does not count. It leaves out the first
    step, which touches most memory for the first time.
    """

    def __init__(self) -> None:
        self._worked: dict[Operation, deque[float]] = {}
        self._seen: dict[Operation, int] = {}  # in which step last
        self._computed: deque[tuple[float, float]] = deque(maxlen=_STEPS)
        self._step = 0

    def worked(self, operation: Operation, numel: int, seconds: float) -> None:
        if operation in BYTES and numel > 0 and self._computed:
            self._worked.setdefault(operation, deque(maxlen=_SAMPLES)).append(seconds / numel)
            self._seen[operation] = self._step

    def computed(self, forward: float, backward: float) -> None:
        self._computed.append((forward, backward))
        self._step += 1

    @property
    def forward(self) -> float:
        return median(forward for forward, _ in self._computed)

    @property
    def backward(self) -> float:
        return median(backward for _, backward in self._computed)

    @property
    def reading(self) -> float:
        """Returns the time of the first forward: a forward takes at most about half as long as its backward, and what
        "forward" has beyond that are micro-batches whose gradients were not final."""
        return min(self.forward, self.backward / 2)

    @property
    def known(self) -> bool:
        """Returns whether any operation was timed."""
        return bool(self._worked)

    @property
    def operations(self) -> list[Operation]:
        """Returns the operations that were timed lately."""
        return [operation for operation in self._worked if self._is_fresh(operation)]

    def seconds(self, operation: Operation, numel: int) -> float:
        """Returns the time for ``numel`` elements; estimated from other operations if it was not timed lately."""
        if self._is_fresh(operation):
            return median(self._worked[operation]) * numel
        others = [other for other in self._worked if self._is_fresh(other)] or list(self._worked)
        return numel * min(median(self._worked[other]) * BYTES[operation] / BYTES[other] for other in others)

    def _is_fresh(self, operation: Operation) -> bool:
        return operation in self._seen and self._step - self._seen[operation] < _STALE


@dataclass(frozen=True)
class StepTimes:
    """Holds the seconds that each operation takes for the whole model, and how a step runs."""

    forward: float  # until the last backward begins
    reading: float  # the first part of it, in which parameters are needed for the first time
    backward: float
    step: float
    journaled: float
    replay: float
    publish: float
    settle: float
    on_demand: bool  # forward waits for each part separately
    withdraws: bool  # the verdict takes back speculation that no worker has begun

    def is_like(self, other: StepTimes, tolerance: float) -> bool:
        """Returns whether no time differs by more than the share ``tolerance`` of itself."""
        if (self.on_demand, self.withdraws) != (other.on_demand, other.withdraws):
            return False
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return all(abs(mine - theirs) <= tolerance * max(mine, theirs) for mine, theirs in pairs)


@dataclass(frozen=True)
class Kind:
    """Describes one step: ``speculated`` is the share of its parts to speculate if there is time, ``published`` the
    share of the others, first in forward order, to step in two phases. ``clips``: the verdict clips."""

    speculated: float
    published: float
    clips: bool


@dataclass
class _Progress:
    now: float  # of the training thread
    processors: float  # when they become free
    settled: list[float]  # when each part, in backward order, can take its next gradient

    def compute(self, seconds: float) -> None:
        """Has the training thread compute for ``seconds``."""
        self.now += seconds

    def wait_for(self, moment: float) -> None:
        """Has the training thread wait until ``moment``, unless that is past."""
        self.now = max(self.now, moment)

    def work(self, seconds: float) -> None:
        """Has the processors work for ``seconds`` more."""
        self.processors += seconds

    def work_until(self, moment: float) -> None:
        self.processors = moment

    def settle(self, published: int, seconds: float) -> None:
        """Settles the last ``published`` parts one after the other, in backward order; the others are settled."""
        parts = len(self.settled)
        self.settled = [0.0] * parts
        for part in range(parts - published, parts):
            self.work(seconds)
            self.settled[part] = self.processors


@lru_cache(maxsize=4096)
def period(times: StepTimes, kinds: tuple[Kind, ...], parts: int) -> float:
    """Returns the seconds that the steps ``kinds`` take when they repeat, in the steady state."""
    progress = _Progress(0.0, 0.0, [0.0] * parts)
    began = 0.0
    for _ in range(3 if len(kinds) == 1 else 2):
        began = progress.now
        for kind in kinds:
            speculated = _backward(times, kind, parts, progress)
            published = _after_verdict(times, kind, parts, speculated, progress)
            progress.settle(published, times.settle / parts)
    return progress.now - began


def _backward(times: StepTimes, kind: Kind, parts: int, progress: _Progress) -> int:
    """Runs backward until the verdict; returns how many parts were speculated by then, or will be."""
    wanted, speculated = round(kind.speculated * parts), 0
    begins = []
    processors = progress.processors
    for part in range(parts):
        progress.compute(times.backward / parts)
        progress.wait_for(progress.settled[part])
        if part < wanted:
            begins.append(max(processors, progress.now))
            processors = begins[-1] + times.journaled / parts
    for begin in begins:
        if begin <= progress.now or not times.withdraws:  # the verdict comes with the last gradient
            progress.work_until(begin + times.journaled / parts)
            speculated += 1
    progress.work_until(max(progress.processors, progress.now))
    return speculated


def _after_verdict(times: StepTimes, kind: Kind, parts: int, speculated: int, progress: _Progress) -> int:
    """Runs until forward is over; returns how many parts were published, the first ones in forward order."""
    waiting = parts - speculated
    published = round(kind.published * waiting)
    for part in range(parts):  # in forward order
        if part < published:
            progress.work(times.publish / parts)
        elif part < waiting:
            progress.work(times.step / parts)
        elif kind.clips:
            progress.work(times.replay / parts)
        if times.on_demand:
            progress.wait_for(progress.processors)
            progress.compute(times.reading / parts)
    if not times.on_demand:
        progress.wait_for(progress.processors)
        progress.compute(times.reading)
    progress.compute(times.forward - times.reading)
    return published
