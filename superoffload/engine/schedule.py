"""A schedule chooses when buckets are stepped: before the verdict, after it, or in two phases. Results never change.

It predicts the verdict from the last ones and the time of a step from measured times. [Note: the step model] below.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import median

from superoffload import _native
from superoffload.engine.verdict import Verdict
from superoffload.errors import ArgumentError

Operation = _native.Operation

MODES = ("adaptive", "always", "never")

# This rule holds where no times are known, or where the model computes on the processors that step buckets. After the
# verdict a replay costs about 1.2 passes, a step 1 and a commit none: speculation pays below a chance of 1 / 1.2.
_REPLAY_COST = 1.2
_PARTS = 64  # of the step model, at most
_STRIDE = 4  # in parts, of the coarse search for the best share
_LIKE = 0.03  # smaller changes of times do not need a new choice
_STOP_MEMORY = 0.8  # of the average share at which a clip was proven


@dataclass(frozen=True)
class Situation:
    """Describes a step at its verdict: ``numel`` elements, of which ``waiting`` were not speculated."""

    numel: int
    waiting: int
    buckets: int
    apart: bool  # the model computes elsewhere than on the processors that step buckets
    on_demand: bool  # parameters are delivered one by one, while forward runs


class Schedule:
    """Chooses, with ``mode`` "adaptive", by a prediction of the verdict and by measured times.

    "always" speculates every bucket until the known part of the norm proves a clip, and steps the others in one pass.
    "never" steps all buckets in one pass after the verdict.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ArgumentError(f"speculation={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        self.mode = mode
        self.times = MeasuredTimes()
        self._predictor = SpoilPredictor()
        self._spoiled = False  # the last verdict clipped or skipped
        self._decided: float | None = None  # the share of this step, in order of arrival, to speculate
        self._stopped_at = 1.0  # recent average: share of the elements speculated when a clip was proven
        self._published = {False: 0.0, True: 0.0}  # the last choice, by whether the step was speculated
        self._situation = Situation(0, 0, 0, apart=False, on_demand=False)
        self._times: StepTimes | None = None  # used for the last choices

    # ---- questions of the engine ------------------------------------------------------------------------------

    def should_speculate(self, packed: float = 0.0) -> bool:
        """Returns whether to speculate the next bucket of the step that is in backward.

        ``packed``: the share of the model whose gradients have been packed, that bucket included.
        """
        if self.mode != "adaptive":
            return self.mode == "always"
        if self._decided is None:
            self._decided = self._share_to_speculate()
        return self._decided > 0 and packed <= self._decided

    def prepare(self) -> None:
        """Does in advance what takes long about the choices after the verdict, while the caller waits for a device."""
        if self.mode == "adaptive" and self._situation.apart and self.times.known:
            self._renew_times()
            self._share_to_speculate()

    def share_to_publish(self, situation: Situation) -> float:
        """Returns the share of the waiting elements to publish first and settle later."""
        before, self._situation = self._situation, situation
        if self.mode != "adaptive" or not (situation.apart and self.times.known and situation.waiting):
            return 0.0
        if (situation.numel, situation.on_demand) != (before.numel, before.on_demand):
            self._renew_times()
        spoils = self._spoiled
        parts = max(1, round(self._parts * situation.waiting / situation.numel))
        share = 1.0 - parts / self._parts
        decided = self._decided = self._share_to_speculate()  # for the next step
        clips = self._predictor.chance > 0.5
        likely = Kind(min(decided, self._stopped_at) if clips else decided, self._published[decided > 0], clips=clips)

        def seconds(part: int) -> float:
            return self._period_after(Kind(share, part / parts, spoils), likely)

        coarse: int = min(range(0, parts + 1, _STRIDE), key=seconds)
        near = range(max(0, coarse - _STRIDE + 1), min(parts, coarse + _STRIDE - 1) + 1)
        chosen: float = min((0, *near, parts), key=seconds) / parts
        self._published[share > 0] = chosen
        return chosen

    # ---- reports of the engine --------------------------------------------------------------------------------

    def observe(self, verdict: Verdict) -> None:
        """Learns from a verdict. A skipped step undoes speculation just like a clip."""
        self._spoiled = verdict.found_inf or verdict.clip_coefficient < 1.0
        self._predictor.observe(self._spoiled)
        self._decided = None

    def speculated(self, share: float) -> None:
        """Learns the share of a step's elements that had been speculated, or submitted for it, at the verdict."""
        if self._spoiled and share > 0:
            self._stopped_at = _STOP_MEMORY * self._stopped_at + (1 - _STOP_MEMORY) * share

    # ---- choosing ---------------------------------------------------------------------------------------------

    def _share_to_speculate(self) -> float:
        """Chooses all, nothing, or all but the last bucket, which starts at the verdict and may delay forward."""
        if not (self._situation.apart and self.times.known):
            return float(self._predictor.chance * _REPLAY_COST < 1.0)
        shares = (1.0, 1.0 - 1.0 / self._parts, 0.0)

        def expected(share: float) -> float:
            good = self._best(share, clips=False)
            return good + self._predictor.chance * (self._best(min(share, self._stopped_at), clips=True) - good)

        return min(shares, key=expected)

    def _best(self, speculated: float, *, clips: bool) -> float:
        """Returns the period of such steps with the best share of their elements in two phases."""
        times = self._step_times()
        return min(period(times, (Kind(speculated, part / 4, clips),), self._parts) for part in range(5))

    @property
    def _parts(self) -> int:
        return min(self._situation.buckets, _PARTS)

    def _period_after(self, this: Kind, likely: Kind) -> float:
        times = self._step_times()
        if (this.speculated > 0) == (likely.speculated > 0) and this.clips == likely.clips:
            return period(times, (this,), self._parts)
        return period(times, (this, likely), self._parts)

    def _step_times(self) -> StepTimes:
        if self._times is None:
            self._renew_times()
        assert self._times is not None
        return self._times

    def _renew_times(self) -> None:
        """Takes the times measured so far; keeps those of before while they have changed little, since the periods of
        such steps are cached."""
        numel, times = self._situation.numel, self.times
        now = StepTimes(
            times.forward,
            times.reading,
            times.backward,
            times.seconds(Operation.step, numel),
            times.seconds(Operation.step_journaled, numel),
            times.seconds(Operation.replay, numel),
            times.seconds(Operation.publish, numel),
            times.seconds(Operation.settle, numel),
            self._situation.on_demand,
            withdraws=self._situation.apart,
        )
        if self._times is None or not self._times.is_like(now, _LIKE):
            self._times = now


_DEPTH = 4  # verdicts in the longest context: enough for patterns with a period of up to five steps
_MEMORY = 0.97  # older counts of a context are multiplied by this at each new one
_PRIOR = 3.0  # the weight of the shorter context's prediction, in verdicts


class SpoilPredictor:
    """Mixes Markov contexts: the longer one counts more, the more often it was seen.

    It learns a pattern such as "every other step clips" after a few repetitions. Where verdicts are independent, every
    context tends to their rate. It notices the end of a long run of clips at once, since few contexts with the new
    verdict were followed by a clip.
    """

    def __init__(self) -> None:
        self._last: tuple[bool, ...] = ()
        self._seen: dict[tuple[bool, ...], tuple[float, float]] = {}  # context -> spoiled, all; fading

    def observe(self, spoiled: bool) -> None:
        """Learns whether the verdict of a step clipped or skipped it."""
        for length in range(len(self._last) + 1):
            context = self._last[len(self._last) - length :]
            count, total = self._seen.get(context, (0.0, 0.0))
            self._seen[context] = (_MEMORY * count + spoiled, _MEMORY * total + 1.0)
        self._last = (*self._last, spoiled)[-_DEPTH:]

    @property
    def chance(self) -> float:
        """Returns the probability that the next verdict spoils; 0 before the first one."""
        chance = 0.0
        for length in range(len(self._last) + 1):
            count, total = self._seen.get(self._last[len(self._last) - length :], (0.0, 0.0))
            if total:
                prior = _PRIOR if length else 0.0
                chance = (count + prior * chance) / (total + prior)
        return chance


# [Note: the step model]
# The step model predicts from measured times how long a training step takes. It divides the buckets into equal parts
# that become ready evenly over the last backward and are needed evenly over the first forward, which begins a step.
# With gradient accumulation whole micro-batches, which need no new parameters, lie between the two. The processors do
# one operation after the other, as the engine submits them: speculated steps during backward; after the verdict
# commits, replays, steps and publishes in forward order; then the settles in backward order. Each settle delays its
# part's next gradient.

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
        """Notes how long an operation on a bucket took the worker threads."""
        if operation in BYTES and numel > 0 and self._computed:
            self._worked.setdefault(operation, deque(maxlen=_SAMPLES)).append(seconds / numel)
            self._seen[operation] = self._step

    def computed(self, forward: float, backward: float) -> None:
        """Notes how long the model computed between the last step and this verdict."""
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


@lru_cache(maxsize=4096)
def period(times: StepTimes, kinds: tuple[Kind, ...], parts: int) -> float:
    """Returns the seconds that the steps ``kinds`` take when they repeat, in the steady state."""
    now = processors = began = 0.0
    settled = [0.0] * parts
    for _ in range(3 if len(kinds) == 1 else 2):
        began = now
        for kind in kinds:
            now, processors, settled = _one_step(times, kind, now, processors, settled)
    return now - began


def _one_step(
    times: StepTimes, kind: Kind, now: float, processors: float, settled: list[float]
) -> tuple[float, float, list[float]]:
    """Runs a backward that begins ``now``, the verdict and the next forward. Returns when that is over, when the
    processors become free, and when each part, in backward order, can take its next gradient."""
    parts = len(settled)
    begins, free = [], processors
    for part in range(parts):
        now = max(now + times.backward / parts, settled[part])
        if part < round(kind.speculated * parts):
            begins.append(max(free, now))
            free = begins[-1] + times.journaled / parts
    # The verdict comes with the last gradient.
    speculated = [begin for begin in begins if begin <= now or not times.withdraws]
    if speculated:
        processors = speculated[-1] + times.journaled / parts
    processors = max(processors, now)
    waiting = parts - len(speculated)
    published = round(kind.published * waiting)
    for part in range(parts):  # in forward order
        if part < published:
            processors += times.publish / parts
        elif part < waiting:
            processors += times.step / parts
        elif kind.clips:
            processors += times.replay / parts
        if times.on_demand:
            now = max(now, processors) + times.reading / parts
    if not times.on_demand:
        now = max(now, processors) + times.reading
    now += times.forward - times.reading
    settled = [0.0] * parts
    for part in range(parts - published, parts):
        processors += times.settle / parts
        settled[part] = processors
    return now, processors, settled
