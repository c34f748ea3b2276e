"""Settles masters and moments before they are read or written, also for checkpoints."""

from __future__ import annotations

from typing import Any

from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.driver import PartitionDriver
from superoffload.integrations.deepspeed.stage3.agreement import Ranks
from superoffload.integrations.deepspeed.stage3.gradients import Gradients
from superoffload.integrations.deepspeed.stage3.inner_optimizer import InnerOptimizer


class SavedState:
    """Shows readers the state of the last finished step, and takes what they load."""

    def __init__(self, driver: PartitionDriver, inner: InnerOptimizer, ranks: Ranks, gradients: Gradients) -> None:
        self._driver = driver
        self._inner = inner
        self._ranks = ranks
        self._gradients = gradients

    def synchronize(self) -> None:
        """Returns once nothing runs: parameters, masters and moments are those of the last finished step."""
        self._gradients.wait()
        with held_signals():
            self._driver.engine.quiesce()

    def settle(self, param: Any) -> None:
        """Brings one parameter's master and moments to the last finished step, so that they may be written."""
        self._gradients.wait()
        self._ranks.look()
        self._driver.settle(param.ds_id)

    def before_load(self) -> list[dict[str, Any]]:
        """Returns the state that ``take_loaded()`` needs."""
        return self._inner.before_load()

    def take_loaded(self, mine: list[dict[str, Any]]) -> None:
        """Takes over the state that DeepSpeed has loaded."""
        steps = self._inner.take_loaded(mine)
        self._driver.set_steps(steps)
        self._inner.show_steps(self._driver.steps)
        self._ranks.loaded(max(steps))

    def digests(self) -> dict[str, str]:
        """Returns SHA-256 of this rank's masters, moments and published partitions, as after the last finished step."""
        self.synchronize()
        return self._driver.engine.digests()
