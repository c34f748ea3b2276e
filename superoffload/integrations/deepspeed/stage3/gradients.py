"""Moves reduced gradients into the flat buffer and on to speculation; serves those who read or write them there."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver
from superoffload.integrations.deepspeed.stage3.agreement import Failures, Ranks
from superoffload.integrations.deepspeed.stage3.copies import Copies
from superoffload.integrations.deepspeed.stage3.stock import StockStage3


class Gradients:
    """Follows a window's gradients."""

    def __init__(
        self,
        stock: StockStage3,
        driver: PartitionDriver,
        copies: Copies,
        ranks: Ranks,
        failures: Failures,
        *,
        boundary_is_told: bool,
    ) -> None:
        """Takes ``boundary_is_told``: DeepSpeed knows which backward is the window's last."""
        self._stock = stock
        self._driver = driver
        self._copies = copies
        self._ranks = ranks
        self._failures = failures
        self._boundary_is_told = boundary_is_told

    def take(self, params: list[Any], reduced: list[Tensor]) -> list[Tensor]:
        """Takes reduced gradient partitions, on DeepSpeed's reduce stream; returns their places in the flat buffer."""
        driver, taken = self._driver, []
        with held_signals():
            with self._failures.kept():
                self._ranks.look()
            for param, incoming in zip(params, reduced, strict=True):
                with self._failures.kept():
                    driver.retract(driver.partitions[param.ds_id])
                taken.append(driver.take(param.ds_id, incoming))
                self._copies.hold(param.grad)
                param.grad = None
            self._copies.follow([partition for partition in taken if self._is_last(partition)])
        return [partition.gradient for partition in taken]

    def _is_last(self, partition: Partition) -> bool:
        """Tells whether this gradient is most likely the window's last. A later one undoes the work done with it."""
        told = self._stock.is_gradient_accumulation_boundary
        if callable(told):  # a method since 0.19
            told = told()
        if self._boundary_is_told and (self._stock.gradient_accumulation_steps > 1 or not told):
            return bool(told)
        return partition.arrivals >= partition.expected  # as many as last time

    def wait(self) -> None:
        """Waits until everything that was reduced is in host memory."""
        self._copies.wait()

    def abandon(self) -> None:
        """Ends the window without a step: nothing has changed."""
        with held_signals():
            self._copies.forget()
            self._driver.abandon()

    # ---- who reads and writes accumulated gradients ---------------------------------------------------------------

    def partition_of(self, param: Any, *, write: bool) -> Tensor:
        """Returns the accumulated gradient's partition, padding included, as DeepSpeed's readers expect it."""
        self.wait()
        partition = self._driver.partitions[param.ds_id]
        if write:
            self._driver.retract(partition)
            partition.written_from_outside()
        return partition.padded

    def in_fp32(self) -> dict[int, dict[int, Tensor]]:
        """Copies the gradients, by sub-group and place in it."""
        return {
            sub_group: {i: self.partition_of(param, write=False).float() for i, param in enumerate(params)}
            for sub_group, params in enumerate(self._stock.fp16_groups)
        }

    def for_state_api(self, param: Any, *, only_read: bool) -> tuple[Tensor, int]:
        """Returns one parameter's gradient and its sub-group, as DeepSpeed's functions that get and set it expect."""
        sub_group = self._stock.grad_position[self._stock.get_param_id(param)][0]
        if only_read:
            return self.partition_of(param, write=False).float().clone(), sub_group
        return self.partition_of(param, write=True), sub_group
