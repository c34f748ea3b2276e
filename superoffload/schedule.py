"""When buckets are stepped: before the verdict, in one pass after it, or in two phases. Never changes a result."""

from __future__ import annotations

from dataclasses import dataclass

from superoffload import _native
from superoffload.errors import ArgumentError
from superoffload.prediction import SpoilPredictor
from superoffload.step_model import Kind, MeasuredTimes, StepTimes, period
from superoffload.verdict import Verdict

MODES = ("adaptive", "always", "never")

# Where no times are known, or the model computes with the processors that step buckets: a replay costs about 1.2
# passes after the verdict where stepping costs 1, and a commit none. So speculating pays below a chance of 1 / 1.2.
_REPLAY_COST = 1.2
_PARTS = 16  # of the model that choices are made by
_MEMORY = 0.8

Operation = _native.Operation


@dataclass(frozen=True)
class Situation:
    """What the core knows at a verdict. ``waiting``: elements that were not speculated; ``numel``: of all buckets."""

    numel: int
    waiting: int
    apart: bool  # the model computes elsewhere than on the processors that step buckets
    on_demand: bool  # parameters are delivered one by one, while forward runs


class Schedule:
    """``mode`` "adaptive": chooses by what it predicts of the verdict and by measured times.

    "always": speculates every bucket until the known part of the norm proves a clip; what was not speculated is
    stepped in one pass. "never": everything in one pass after the verdict.
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ArgumentError(f"speculation={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        self.mode = mode
        self.times = MeasuredTimes()
        self._predictor = SpoilPredictor()
        self._decided: bool | None = None  # whether the step in backward is speculated
        self._stopped_at = 1.0  # share of the elements that was speculated when a clip was proven, lately
        self._published = {False: 0.0, True: 0.0}  # share chosen last, where steps were speculated and where not
        self._situation = Situation(0, 0, apart=False, on_demand=False)

    # ---- what the core asks -----------------------------------------------------------------------------------

    def wants(self) -> bool:
        """Whether buckets of the step that is now in backward should be speculated."""
        if self.mode != "adaptive":
            return self.mode == "always"
        if self._decided is None:
            self._decided = self._speculating_pays()
        return self._decided

    def publishes(self, situation: Situation) -> float:
        """Which share of the elements that wait for a verdict is to be published first and settled later."""
        self._situation = situation
        if self.mode != "adaptive" or not (situation.apart and self.times.known and situation.waiting):
            return 0.0
        spoils = self._spoiled
        share = 1.0 - situation.waiting / situation.numel
        wanted = self._speculating_pays()
        self._decided = wanted  # for the step that comes now
        likely = Kind(self._share(wanted), self._published[wanted], clips=self.chance > 0.5)
        candidates = range(round(_PARTS * situation.waiting / situation.numel) + 1)
        best = min(
            (self._period_after(Kind(share, part / max(1, candidates[-1]), spoils), likely), part)
            for part in candidates
        )[1]
        chosen = best / max(1, candidates[-1])
        self._published[share > 0] = chosen
        return chosen

    # ---- what the core tells ----------------------------------------------------------------------------------

    def observe(self, verdict: Verdict) -> None:
        """Learns from a verdict. A skipped step undoes speculation just like a clip."""
        self._spoiled = verdict.found_inf or verdict.clip_coefficient < 1.0
        self._predictor.observe(self._spoiled)
        self._decided = None

    def speculated(self, share: float) -> None:
        """This share of a step's elements had been speculated, or was about to be, when its verdict came."""
        if self._spoiled and share > 0:
            self._stopped_at = _MEMORY * self._stopped_at + (1 - _MEMORY) * share

    def worked(self, operation: Operation, numel: int, seconds: float) -> None:
        """An operation on a bucket took the worker threads this long."""
        self.times.worked(operation, numel, seconds)

    def computed(self, forward: float, backward: float) -> None:
        """The model computed for this long between the last step and this verdict."""
        self.times.computed(forward, backward)

    # ---- choosing ---------------------------------------------------------------------------------------------

    _spoiled = False

    @property
    def chance(self) -> float:
        """That the coming verdict clips or skips."""
        return self._predictor.chance

    def _speculating_pays(self) -> bool:
        if not (self._situation.apart and self.times.known):
            return self.chance * _REPLAY_COST < 1.0
        waiting = self._best(0.0, clips=False)
        good, bad = self._best(1.0, clips=False), self._best(self._stopped_at, clips=True)
        return self.chance * bad + (1 - self.chance) * good <= waiting

    def _best(self, speculated: float, *, clips: bool) -> float:
        """The period of such steps with the best share of them in two phases."""
        times = self._step_times()
        return min(period(times, [Kind(speculated, part / 4, clips)], _PARTS) for part in range(5))

    def _share(self, speculates: bool) -> float:
        if not speculates:
            return 0.0
        return self._stopped_at if self.chance > 0.5 else 1.0

    def _period_after(self, this: Kind, likely: Kind) -> float:
        times = self._step_times()
        if (this.speculated > 0) == (likely.speculated > 0) and this.clips == likely.clips:
            return period(times, [this], _PARTS)
        return period(times, [this, likely], _PARTS)

    def _step_times(self) -> StepTimes:
        numel, times = self._situation.numel, self.times
        return StepTimes(
            times.forward,
            times.backward,
            times.seconds(Operation.step, numel),
            times.seconds(Operation.step_journaled, numel),
            times.seconds(Operation.replay, numel),
            times.seconds(Operation.publish, numel),
            times.seconds(Operation.settle, numel),
            self._situation.on_demand,
            withdraws=self._situation.apart,
        )


class FixedSchedule(Schedule):
    """The same in every step, for tests and benchmarks: ``published`` of what is not speculated goes in two phases."""

    def __init__(self, *, speculates: bool, published: float) -> None:
        super().__init__("always" if speculates else "never")
        self._share_published = published

    def publishes(self, situation: Situation) -> float:
        return self._share_published
