"""A schedule chooses when buckets are stepped: before the verdict, after it, or in two phases. Results never change."""

from __future__ import annotations

from dataclasses import dataclass

from superoffload import _native
from superoffload.engine.spoil_prediction import SpoilPredictor
from superoffload.engine.step_model import Kind, MeasuredTimes, StepTimes, period
from superoffload.engine.verdict import Verdict
from superoffload.errors import ArgumentError

MODES = ("adaptive", "always", "never")

# This rule holds where no times are known, or where the model computes on the processors that step buckets. After the
# verdict a replay costs about 1.2 passes, a step 1 and a commit none: speculation pays below a chance of 1 / 1.2.
_REPLAY_COST = 1.2
_PARTS = 64  # of the step model, at most
_STRIDE = 4  # in parts, of the coarse search for the best share
_LIKE = 0.03  # smaller changes of times do not need a new choice
_MEMORY = 0.8

Operation = _native.Operation


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
        self._decided = self._share_to_speculate()  # for the next step
        likely = Kind(self._likely_share(), self._published[self._decided > 0], clips=self.chance > 0.5)

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
            self._stopped_at = _MEMORY * self._stopped_at + (1 - _MEMORY) * share

    def worked(self, operation: Operation, numel: int, seconds: float) -> None:
        """Learns how long an operation on a bucket took the worker threads."""
        self.times.worked(operation, numel, seconds)

    def computed(self, forward: float, backward: float) -> None:
        """Learns how long the model computed between the last step and this verdict."""
        self.times.computed(forward, backward)

    # ---- choosing ---------------------------------------------------------------------------------------------

    _spoiled = False

    @property
    def chance(self) -> float:
        """Returns the probability that the next verdict clips or skips."""
        return self._predictor.chance

    def _share_to_speculate(self) -> float:
        """Chooses all, nothing, or all but the last bucket, which starts at the verdict and may delay forward."""
        if not (self._situation.apart and self.times.known):
            return float(self.chance * _REPLAY_COST < 1.0)
        shares = (1.0, 1.0 - 1.0 / self._parts, 0.0)

        def expected(share: float) -> float:
            good = self._best(share, clips=False)
            return good + self.chance * (self._best(min(share, self._stopped_at), clips=True) - good)

        return min(shares, key=expected)

    def _best(self, speculated: float, *, clips: bool) -> float:
        """Returns the period of such steps with the best share of their elements in two phases."""
        times = self._step_times()
        return min(period(times, (Kind(speculated, part / 4, clips),), self._parts) for part in range(5))

    @property
    def _parts(self) -> int:
        return min(self._situation.buckets, _PARTS)

    def _likely_share(self) -> float:
        assert self._decided is not None
        return min(self._decided, self._stopped_at) if self.chance > 0.5 else self._decided

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
