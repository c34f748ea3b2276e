"""The step: a verdict, alone or with other ranks; then commit, replay, step or skip; then what others have stepped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch

from superoffload.arguments import as_float, check_group
from superoffload.errors import HostMemoryError, RankError, WorkerError
from superoffload.gradient_source import gradient_of
from superoffload.optimizer.gradients import Gradients
from superoffload.optimizer.untraced import untraced
from superoffload.ranks.spread import Spread, gather
from superoffload.verdict import Verdict

if TYPE_CHECKING:
    from superoffload.ranks.session import RankSession


class Steps(Gradients):
    """``step()``."""

    _last_verdict: Verdict | None = None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Decides the verdict and commits, replays or skips. Parameters have their new values when it returns; with
        delivery="on_demand", when the module's forward reads them."""
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._whole():
            self._check_usable()  # the closure, or another thread, may have closed it
            self._end_step()
        self._advice.tell()
        return loss

    @untraced
    def _end_step(self) -> None:
        session = self._ranks.session
        verdict = self._decide_alone() if session is None else self._decide_with(session)
        if verdict is None:
            self._idle.without_gradients(sum(len(group["params"]) for group in self.param_groups))
            return
        self._idle.decided(skipped=verdict.found_inf)
        self._last_verdict = verdict
        failure: WorkerError | HostMemoryError | None = None
        try:
            self._apply(verdict)
        except (WorkerError, HostMemoryError) as error:  # the step done, or abandoned where no other rank acts on it
            failure = error
        finally:
            try:
                if session is not None and not verdict.found_inf:
                    self._gather_updates(session)
            finally:  # this rank has stepped, also where others have been lost since
                self._after_step()
        if session is not None:
            self._conclude(session, verdict)
        if failure is not None:
            raise failure

    def _apply(self, verdict: Verdict) -> None:
        self._core.apply(verdict)

    def _conclude(self, session: RankSession, verdict: Verdict) -> None:
        """What was done is compared with what the other ranks did."""
        session.ended(applied=not verdict.found_inf, factor=verdict.gradient_factor)

    def _decide_alone(self) -> Verdict | None:
        self._take_stock()
        if not self._core.is_filling:
            return None
        verdict = self._core.decide(unscale=self._unscale, max_grad_norm=self._max_grad_norm)
        if self._foreign_inf():
            verdict = verdict._replace(found_inf=True)
        return verdict

    def _decide_with(self, session: RankSession) -> Verdict | None:
        """As all ranks do, or RankError on all of them, with the step abandoned."""
        self._core.settle()  # every message has samples of masters
        session.begin()
        try:
            self._take_stock()
            session.agree_on(self._settings(), found_inf=self._foreign_inf())
            return self._core.decide(unscale=self._unscale, max_grad_norm=self._max_grad_norm, exchange=session)
        except BaseException as error:
            session.fail()
            if isinstance(error, RankError):
                self._abandon()
            raise

    def _take_stock(self) -> None:
        self._check_finished()
        for index, group in enumerate(self.param_groups):
            check_group(group)
            unfrozen = [p for p in group["params"] if gradient_of(p) is not None and p not in self._tracked]
            if unfrozen:
                self._refuse_replaced()
                self._adopt(index, unfrozen)
        self._announce()
        self._edits.begin(self._core.buckets)
        self._unscale = self._take_scale()
        if self._reduced is not None:
            self._reduced.finish()
        self._collect()
        self._edits.end()

    def _foreign_inf(self) -> bool:
        """A GradScaler saw a NaN or an infinity before somebody replaced it."""
        return as_float(getattr(self, "found_inf", 0.0)) > 0

    def _settings(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        settings: dict[str, Any] = {}
        for index in range(len(self.param_groups)):
            hyper = self._hyper_of(index)
            settings[f"lr of group {index}"] = hyper.lr
            settings[f"betas, eps, weight_decay of group {index}"] = (
                hyper.beta1,
                hyper.beta2,
                hyper.eps,
                hyper.weight_decay,
            )
        settings["max_grad_norm"] = self._max_grad_norm
        settings["accumulate_dtype"] = "fp32" if self._given.fp32_sums else None
        settings["factor that takes the loss scale out"] = self._unscale
        return settings

    def _gather_updates(self, session: RankSession) -> None:
        """Parameters whose state is spread over ranks: the parts that others have stepped."""
        spreads = [
            Spread(held.holding, held.shard.target(), held.copy())
            for held in session.held
            if held.is_spread and gradient_of(held.param) is not None
        ]
        if spreads:
            gather(session.group, "the updated parameters", spreads)
            torch.autograd.graph.increment_version([held.param for held in session.held if held.is_spread])

    # torch.amp.GradScaler: do not divide the gradients yourself, set grad_scale and found_inf around step().
    _step_supports_amp_scaling = True

    def _take_scale(self) -> float:
        """The factor that takes the loss scale out of gradients: 1 / grad_scale where a GradScaler calls step()."""
        if not hasattr(self, "grad_scale"):
            return 1.0
        if self.grad_scale is None:  # the user called unscale_(), which version counters do not show
            for tracked in self._tracked.values():
                self._let_go_of_edited(tracked)
            return 1.0
        scale = as_float(self.grad_scale)
        return 1.0 / scale if scale != 0.0 else math.inf
