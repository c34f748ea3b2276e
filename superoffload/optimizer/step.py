"""``step()`` collects gradients, decides a verdict, has the engine act on it, and remembers the new values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from superoffload.engine.engine import Engine
from superoffload.engine.verdict import Verdict
from superoffload.errors import HostMemoryError, RankError, WorkerError
from superoffload.optimizer.advice import Advice, IdleSteps
from superoffload.optimizer.delivery import Delivery
from superoffload.optimizer.edits import Edits
from superoffload.optimizer.frameworks import Reductions
from superoffload.optimizer.gradient_source import gradient_of
from superoffload.optimizer.intake import Intake
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.optimizer.other_ranks import Ranks
from superoffload.optimizer.params import Params
from superoffload.optimizer.settings import ClipSettings, LossScale, ParamGroups
from superoffload.optimizer.tracked_param import TrackedParam, end_all, end_step, outdate, remember


@dataclass(eq=False, repr=False)
class Step:
    """Ends steps by a verdict, or with nothing changed."""

    _engine: Engine
    _groups: ParamGroups
    _params: Params
    _ranks: Ranks
    _intake: Intake
    _edits: Edits
    _delivery: Delivery
    _reductions: Reductions
    _master_updates: MasterUpdates
    _clipping: ClipSettings
    _advice: Advice
    _fp32_sums: bool

    def __post_init__(self) -> None:
        self._idle = IdleSteps(self._advice)

    def run(self, scale: LossScale) -> None:
        """Takes stock, decides a verdict, acts on it and delivers, and remembers what the next step compares.

        Where ranks cannot decide, all of them abandon the step and raise RankError."""
        try:
            with self._ranks.deciding():
                self._take_stock(scale)
                self._ranks.agree_on(self._settings(), found_inf=scale.saw_inf)
                verdict = self._decide(found_inf=scale.saw_inf)
        except RankError:
            self.abandon()
            raise
        if verdict is None:
            self._idle.without_gradients(len(self._groups.params()))
            self._clipping.without_gradients()
            return
        norm, threshold = verdict.grad_norm, self._clipping.max_grad_norm
        self._idle.decided(skipped=verdict.found_inf, norm=norm, max_grad_norm=threshold)
        self._clipping.decided(verdict)
        failure: WorkerError | HostMemoryError | None = None
        try:
            with self._delivery.acting():
                self._engine.apply(verdict, later=self._delivery.later)
        except (WorkerError, HostMemoryError) as error:  # the step was completed or abandoned; raised below
            failure = error
        finally:
            try:
                if not verdict.found_inf:
                    self._ranks.gather_updates()
            finally:  # in any case: parameters may have changed, even if other ranks were lost since
                self._remember()
        self._ranks.conclude(verdict)
        self._advice.keep_of_held(self._engine.speculator.held)
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Ends the step with nothing changed: the user never called ``step()``, or no verdict was reached."""
        self._intake.forget()
        self._reductions.forget()
        end_all(tracked.gradient for tracked in self._params)
        self._engine.abandon()

    # ---- before the verdict -----------------------------------------------------------------------------------

    def _take_stock(self, scale: LossScale) -> None:
        """Brings the engine up to date with the user's gradients and parameters.

        First the last step ends; then waiting gradients, new parameters and reductions are taken, so that all gradients
        are known when they and the parameters are compared with what the user has now. An error here leaves gradients
        and speculated buckets as they are: the caller may call ``step()`` again, or ``zero_grad()``."""
        engine = self._engine
        engine.link.check_stream()
        engine.last_step.land()
        self._ranks.look()
        self._intake.check_finished()
        self._intake.take_waiting()
        self._params.follow_state_edits()
        for index, group in enumerate(self._groups.now):
            self._groups.hyper(index)  # raises for a bad setting
            unfrozen = [p for p in self._params.without_state(group["params"]) if gradient_of(p) is not None]
            if unfrozen:
                self._intake.adopt(index, unfrozen)
        self._ranks.announce()
        self._edits.begin()
        if scale.was_taken_out:
            self._edits.all_edited()
        self._clipping.unscale = scale.inverse
        self._reductions.finish()
        self._edits.collect()
        if self._engine.is_filling and self._engine.schedule.mode != "never":
            self._reductions.stepped(self._advice)
        self._params.check_apart()

    def _settings(self) -> dict[str, Any]:
        """Returns the settings that must be the same on all ranks."""
        return {
            **self._groups.settings(),
            "max_grad_norm": self._clipping.max_grad_norm,
            "accumulate_dtype": "fp32" if self._fp32_sums else None,
            "factor that takes the loss scale out": self._clipping.unscale,
        }

    def _decide(self, *, found_inf: bool) -> Verdict | None:
        """Decides the verdict, the same as all ranks; None if no rank has a gradient. ``found_inf``: a scaler saw a NaN
        or an infinity; with other ranks they know it from ``agree_on()``."""
        terms, session = self._clipping, self._ranks.session
        if session is not None:
            return self._engine.decide(unscale=terms.unscale, max_grad_norm=terms.max_grad_norm, exchange=session)
        if not self._engine.is_filling:
            return None
        verdict = self._engine.decide(unscale=terms.unscale, max_grad_norm=terms.max_grad_norm)
        return verdict._replace(found_inf=True) if found_inf else verdict

    # ---- after the verdict ------------------------------------------------------------------------------------

    def _remember(self) -> None:
        everything = list(self._params)
        ours, outdated = everything, list[TrackedParam]()
        landing = self._engine.last_step.landing_shards()
        if landing:
            outdated = [tracked for tracked in everything if tracked.shard.index in landing]
            ours = [tracked for tracked in everything if tracked.shard.index not in landing]
        moved = end_step(everything)
        self._intake.begin_anew()
        self._master_updates.count_step()
        outdate(outdated)
        remember(ours, on_device=self._master_updates.compares_on_device)
        self._params.count_steps(moved)
