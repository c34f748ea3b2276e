"""Steps all sub-groups by one verdict: commits, replays, steps or skips them, and publishes."""

from __future__ import annotations

import math

from torch import Tensor

from superoffload.engine.verdict import Verdict
from superoffload.integrations.deepspeed.driver import PartitionDriver, Window
from superoffload.integrations.deepspeed.stage3.agreement import Failures, Ranks
from superoffload.integrations.deepspeed.stage3.formulas import clip
from superoffload.integrations.deepspeed.stage3.inner_optimizer import InnerOptimizer
from superoffload.integrations.deepspeed.stage3.stock import StockStage3


class Steps:
    """Makes DeepSpeed's norm, clip and loss scale a verdict and has the engine act on it."""

    def __init__(
        self,
        stock: StockStage3,
        driver: PartitionDriver,
        inner: InnerOptimizer,
        ranks: Ranks,
        failures: Failures,
        *,
        on_demand: bool,
        crowded: bool,
    ) -> None:
        """Takes ``crowded``: there are more ranks than processors, so delivering later would only slow other ranks."""
        self._stock = stock
        self._driver = driver
        self._inner = inner
        self._ranks = ranks
        self._failures = failures
        self._may_wait = on_demand and not crowded
        self._later = False

    @property
    def later(self) -> bool:
        """Tells whether parameters of the last step may still be undelivered."""
        return self._later

    def skip(self, scale: float) -> None:
        """Skips a step, since a gradient was not finite: nothing changes. ``scale``: the loss scale of the window."""
        self._later = False
        with self._failures.kept():
            self._driver.step(Verdict(math.inf, 1.0, True, 1.0 / scale), later=False)
        self._ranks.ended(applied=False, factor=1.0 / scale)

    def apply(self, window: Window, norm: Tensor, grad_norm: float, *, expected: float, scale: float) -> None:
        """Divides gradients by ``scale``, clips and steps; ``expected``: the scale that speculation has used."""
        self._later = False
        if window.sums:
            speculating = self._driver.engine.schedule.should_speculate()
            coefficient, factor = clip(norm, scale, self._stock.clip_grad)
            # If backward has done the work, nothing is left to deliver later, and persistent parameters are gathered
            # together. This rank's own progress must not decide: all ranks must gather alike.
            self._later = self._may_wait and not (speculating and factor == 1.0 / expected)
            with self._failures.kept():  # the step was completed even so
                self._driver.step(Verdict(grad_norm, coefficient, False, factor), later=self._later)
            self._ranks.ended(applied=True, factor=factor)
        self._inner.show_steps(self._driver.steps)
        self._inner.stepped()
