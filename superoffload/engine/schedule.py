"""When buckets are stepped: before the verdict, in one pass after it, or in two phases. Never changes a result."""

from __future__ import annotations

from dataclasses import dataclass

from superoffload import _native
from superoffload.engine.spoil_prediction import SpoilPredictor
from superoffload.engine.step_model import Kind, MeasuredTimes, StepTimes, period
from superoffload.engine.verdict import Verdict
from superoffload.errors import ArgumentError

MODES = ("adaptive", "always", "never")

# Where no times are known, or the model computes with the processors that step buckets: a replay costs about 1.2
# passes after the verdict where stepping costs 1, and a commit none. So speculating pays below a chance of 1 / 1.2.
_REPLAY_COST = 1.2
_PARTS = 64  # at most, of the model that choices are made by
_STRIDE = 4  # of them, when looking for the best share
_LIKE = 0.03  # times that differ by less are not worth choosing anew
_MEMORY = 0.8

Operation = _native.Operation


@dataclass(frozen=True)
class Situation:
    """What the core knows at a verdict. ``waiting``: elements that were not speculated; ``numel``: of all buckets."""

    numel: int
    waiting: int
    buckets: int
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
        self._decided: float | None = None  # the share of the step in backward that is speculated, as it arrives
        self._stopped_at = 1.0  # share of the elements that was speculated when a clip was proven, lately
        self._published = {False: 0.0, True: 0.0}  # share chosen last, where steps were speculated and where not
        self._situation = Situation(0, 0, 0, apart=False, on_demand=False)
        self._times: StepTimes | None = None  # that the last choices were made by

    # ---- what the core asks -----------------------------------------------------------------------------------

    def wants(self, packed: float = 0.0) -> bool:
        """Whether the next bucket of the step that is now in backward should be speculated.

        ``packed``: the share of the model whose gradients have been packed, with that bucket's.
        """
        if self.mode != "adaptive":
            return self.mode == "always"
        if self._decided is None:
            self._decided = self._share_to_speculate()
        return self._decided > 0 and packed <= self._decided

    def publishes(self, situation: Situation) -> float:
        """Which share of the elements that wait for a verdict is to be published first and settled later."""
        self._situation = situation
        if self.mode != "adaptive" or not (situation.apart and self.times.known and situation.waiting):
            return 0.0
        spoils = self._spoiled
        parts = max(1, round(self._parts * situation.waiting / situation.numel))
        share = 1.0 - parts / self._parts
        self._decided = self._share_to_speculate()  # for the step that comes now
        likely = Kind(self._likely_share(), self._published[self._decided > 0], clips=self.chance > 0.5)

        def seconds(part: int) -> float:
            return self._period_after(Kind(share, part / parts, spoils), likely)

        coarse: int = min(range(0, parts + 1, _STRIDE), key=seconds)
        near = range(max(0, coarse - _STRIDE + 1), min(parts, coarse + _STRIDE - 1) + 1)
        chosen: float = min((0, *near, parts), key=seconds) / parts
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

    def _share_to_speculate(self) -> float:
        """All, nothing, or all but the last bucket: that begins when the verdict is there, and may hold forward up."""
        if not (self._situation.apart and self.times.known):
            return float(self.chance * _REPLAY_COST < 1.0)
        shares = (1.0, 1.0 - 1.0 / self._parts, 0.0)

        def expected(share: float) -> float:
            good = self._best(share, clips=False)
            return good + self.chance * (self._best(min(share, self._stopped_at), clips=True) - good)

        return min(shares, key=expected)

    def _best(self, speculated: float, *, clips: bool) -> float:
        """The period of such steps with the best share of them in two phases."""
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
        """Those of the step before while nothing has changed much: what was worked out for them is known."""
        numel, times = self._situation.numel, self.times
        now = StepTimes(
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
        if self._times is None or not self._times.is_like(now, _LIKE):
            self._times = now
        return self._times


class FixedSchedule(Schedule):
    """The same in every step, for tests and benchmarks: ``published`` of what is not speculated goes in two phases."""

    def __init__(self, *, speculates: bool, published: float) -> None:
        super().__init__("always" if speculates else "never")
        self._share_published = published

    def publishes(self, situation: Situation) -> float:
        return self._share_published
