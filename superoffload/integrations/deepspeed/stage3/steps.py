"""``step()``: DeepSpeed's order of events, with one verdict for all sub-groups."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed.runtime.zero import stage3 as stock

from superoffload.errors import StateError
from superoffload.integrations.deepspeed.delivery import gather_together
from superoffload.integrations.deepspeed.stage3.verdicts import Verdicts
from superoffload.interrupts import held_signals
from superoffload.verdict import Verdict


class Steps(Verdicts):
    """Commits, replays, steps or skips, and publishes."""

    @property
    def _delivers_later(self) -> bool:
        return bool(self.superoffload_options.delivery == "on_demand")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """DeepSpeed's order of events, with one verdict for all sub-groups."""
        if closure is not None:
            raise StateError("step(closure): closures are not supported, as in DeepSpeed; call engine.step()")
        if self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks:
            raise StateError("step hooks are not called under DeepSpeed; do around engine.step() what they do")
        with held_signals():
            self._await_gradients()
            self._pre_step()
            self._partition_all_parameters()
            self.timers(stock.OPTIMIZER_STEP_TIMER).start()
            self._step_window()
            self.timers(stock.OPTIMIZER_STEP_TIMER).stop()
            if not self.overflow:
                self._post_step({stock.OPTIMIZER_STEP_TIMER})
            self._check_ranks()

    def _step_window(self) -> None:
        driver = self._opened()
        window, norm = self._close_window()
        scale = float(self.loss_scale)
        unclipped, speculating, self._later = 1.0 / scale, driver.core.schedule.wants(), False
        if self.superoffload_options.match_stock:
            norm = self._stock_norm(window)
        self.overflow = not math.isfinite(float(norm))
        if self.overflow:
            with self._for_the_next_step():
                driver.step(Verdict(math.inf, 1.0, True, 1.0 / scale), later=False)
            self._ended(applied=False, factor=1.0 / scale)
            self._update_scale(True)
            self._global_grad_norm: Any = float("inf")
            self._overflow_clean_up(scale)
            return
        self._update_scale(False)
        if self.superoffload_options.match_stock:
            scale = float(self.loss_scale)  # stock unscales with the scale of the next step
        self._global_grad_norm = (norm / scale).float()
        if window.sums:
            coefficient, factor = self._clip(norm, scale)
            verdict = Verdict(float(self._global_grad_norm), coefficient, False, factor)
            # Where backward has done the work, there is nothing to wait for later, and persistent parameters are
            # gathered together. Not a question of what is done on this rank: all ranks must gather alike.
            in_the_way = self._crowded or (speculating and factor == unclipped)
            self._later = self._delivers_later and not in_the_way
            with self._for_the_next_step():  # the step was completed all the same
                driver.step(verdict, later=self._later)
            self._ended(applied=True, factor=factor)
        self._show_steps()
        self.optimizer._opt_called = True  # torch's schedulers warn where step() was not called, as it is not here

    def _post_step(self, timer_names: Any = ()) -> None:
        """Persistent parameters are gathered by their next reader, where they may not be there yet."""
        persistent: Any = getattr(self, "persistent_parameters")  # noqa: B009
        if self._later:
            self.persistent_parameters = []
        else:
            gather_together(persistent)
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent
