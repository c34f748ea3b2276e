"""Hands a reduced gradient to speculation once its copy into the flat buffer has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from deepspeed.accelerator import get_accelerator
from torch import Tensor

from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver
from superoffload.integrations.deepspeed.stage3.stock import StockStage3

Arrivals = list[tuple[Partition, int]]  # with the number of gradients so far


class HandOver:
    """Gives gradients in host memory to speculation."""

    def __init__(self, stock: StockStage3, driver: PartitionDriver) -> None:
        self._stock = stock
        self._driver = driver

    def __call__(self, arrivals: Arrivals) -> None:
        """Skips partitions that another gradient has reached since: its copy may still run."""
        for partition, arrival in arrivals:
            if partition.arrivals == arrival:
                stock = self._stock
                self._driver.final(partition, unscale=1.0 / stock.loss_scale, max_grad_norm=stock.clip_grad or None)


class Copies(Protocol):
    """Follows the copies of a window."""

    def hold(self, gradient: Tensor | None) -> None:
        """Keeps the memory of ``gradient``, which is about to be freed, until its copy has read it."""

    def follow(self, partitions: Sequence[Partition]) -> None:
        """Notes that the partitions' last copies have begun; hands them to speculation once the copies have ended."""

    def wait(self) -> None:
        """Waits until everything that was reduced is in host memory."""

    def forget(self) -> None:
        """Drops the copies that are under way."""


class EndedCopies:
    """Hands over at once: on processors, copies have ended when they return."""

    def __init__(self, hand_over: HandOver) -> None:
        self._hand_over = hand_over

    def hold(self, gradient: Tensor | None) -> None: ...

    def follow(self, partitions: Sequence[Partition]) -> None:
        self._hand_over([(partition, partition.arrivals) for partition in partitions])

    def wait(self) -> None: ...

    def forget(self) -> None: ...


class RunningCopies:
    """Follows copies by events: on an accelerator they run in the order of DeepSpeed's reduce stream."""

    def __init__(self, stock: StockStage3, hand_over: HandOver) -> None:
        self._stock = stock
        self._hand_over = hand_over
        self._arriving: deque[tuple[Any, Arrivals]] = deque()

    def hold(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            gradient.record_stream(get_accelerator().current_stream())

    def follow(self, partitions: Sequence[Partition]) -> None:
        event = get_accelerator().Event()
        event.record(get_accelerator().current_stream())
        self._arriving.append((event, [(partition, partition.arrivals) for partition in partitions]))
        while self._arriving and self._arriving[0][0].query():
            self._hand_over(self._arriving.popleft()[1])

    def wait(self) -> None:
        self._stock.reduce_and_partition_stream.synchronize()
        while self._arriving:
            self._hand_over(self._arriving.popleft()[1])

    def forget(self) -> None:
        self._arriving.clear()


def copies_of(stock: StockStage3, driver: PartitionDriver) -> Copies:
    """Chooses by the device that reduces gradients."""
    hand_over = HandOver(stock, driver)
    return EndedCopies(hand_over) if get_accelerator().is_synchronized_device() else RunningCopies(stock, hand_over)
