"""Moves reduced gradients into the flat buffer and on to speculation; serves those who read or write them there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed.accelerator import get_accelerator
from torch import Tensor

from superoffload.distributed.session import RankSession
from superoffload.errors import WorkerError
from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver, Window
from superoffload.integrations.deepspeed.zero.stock import Layout, Stock

# ---- ranks compare settings and failures before a step, a part of the published parameters after it -----------------


class Failures:
    """Keeps a failed worker's error until the next step: to raise on one rank alone leaves the others waiting."""

    def __init__(self) -> None:
        self._first: WorkerError | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps the error of work between steps."""
        try:
            yield
        except WorkerError as failure:
            self._first = self._first or failure

    def take(self) -> WorkerError | None:
        """Returns the first error since the last step, and forgets it."""
        first, self._first = self._first, None
        return first


class Ranks:
    """Agrees on a step, and compares its results. Here this rank decides alone: there is nothing to agree on."""

    def exchange(self, window: Window) -> Sequence[float]:
        return list(window.sums.values())

    def begin(self) -> None: ...
    def fail(self) -> None: ...
    def ended(self, *, applied: bool, factor: float) -> None: ...
    def look(self) -> None: ...
    def forget_look(self) -> None: ...
    def check(self, *, later: bool) -> None: ...
    def loaded(self, steps: int) -> None: ...


class Agreement(Ranks):
    """Steps together with the other ranks of a session; ranks that diverge are found.

    It differs from superoffload/optimizer/other_ranks.py in two ways: DeepSpeed finds the norm for all ranks outside
    the engine, and forward gathers before anything is compared.
    """

    def __init__(self, session: RankSession, driver: PartitionDriver, settings: Callable[[], dict[str, Any]]) -> None:
        """Takes ``settings``, which returns what must be the same on all ranks."""
        self.session = session
        self._driver = driver
        self._settings = settings
        self._look_is_due = False

    def begin(self) -> None:
        self.session.begin()
        self.session.agree_on(self._settings(), found_inf=False)

    def exchange(self, window: Window) -> Sequence[float]:
        """Returns the sums of squares of all ranks, in their order, so that a fold has the same bits on all ranks."""
        self.session.start(window.sums)
        return self.session.finish() or []

    def fail(self) -> None:
        self.session.fail()

    def ended(self, *, applied: bool, factor: float) -> None:
        self.session.count(applied=applied, factor=factor)
        self._look_is_due = True

    def look(self) -> None:
        """Compares a part of what the last step has published, before the next one begins or a user writes."""
        if self._look_is_due:
            self._look_is_due = False
            self._driver.deliver()
            self.session.look()

    def forget_look(self) -> None:
        """Cancels the comparison, since a user has written to the parameters."""
        self._look_is_due = False

    def check(self, *, later: bool) -> None:
        """Compares at the end of ``step()``. ``later``: the light check waits until forward has gathered."""
        if not self._look_is_due:
            return
        if self.session.full_check_is_due:
            self.look()
            self.session.check_everything()
        elif not later:
            self.look()

    def loaded(self, steps: int) -> None:
        self.session.loaded(steps)
        self.forget_look()


def agreement(session: RankSession | None, driver: PartitionDriver, settings: Callable[[], dict[str, Any]]) -> Ranks:
    """Chooses who decides: this rank alone, or the ranks of a session."""
    return Ranks() if session is None else Agreement(session, driver, settings)


# ---- gradients go on to speculation once their copies into the flat buffer have ended -------------------------------

Arrivals = list[tuple[Partition, int]]  # with the number of gradients so far


class HandOver:
    """Gives gradients in host memory to speculation."""

    def __init__(self, stock: Stock, driver: PartitionDriver) -> None:
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
    """Follows copies by events: on an accelerator they run in the order of the stream that reduces."""

    def __init__(self, hand_over: HandOver) -> None:
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
        while self._arriving:
            event, arrivals = self._arriving.popleft()
            event.synchronize()
            self._hand_over(arrivals)

    def forget(self) -> None:
        self._arriving.clear()


def copies_of(stock: Stock, driver: PartitionDriver) -> Copies:
    """Chooses by the device that reduces gradients."""
    hand_over = HandOver(stock, driver)
    return EndedCopies(hand_over) if get_accelerator().is_synchronized_device() else RunningCopies(hand_over)


@dataclass(eq=False, repr=False)
class Gradients:
    """Follows a window's gradients."""

    _stock: Stock
    _layout: Layout
    _driver: PartitionDriver
    _copies: Copies
    _ranks: Ranks
    _failures: Failures
    _boundary_is_told: bool  # DeepSpeed knows which backward is the window's last

    def take(self, params: Sequence[Any], reduced: Sequence[Tensor]) -> list[Tensor]:
        """Takes reduced gradient partitions, on DeepSpeed's reduce stream; returns their places in the flat buffer."""
        driver, taken = self._driver, []
        with held_signals():
            with self._failures.kept():
                self._ranks.look()
            for param, incoming in zip(params, reduced, strict=True):
                with self._failures.kept():
                    driver.retract(driver.partitions[self._layout.key(param)])
                taken.append(driver.take(self._layout.key(param), incoming))
                self._copies.hold(self._layout.take_gradient(param))
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
        partition = self._driver.partitions[self._layout.key(param)]
        if write:
            self._driver.retract(partition)
            partition.written_from_outside()
        return partition.padded

    def in_fp32(self) -> dict[int, dict[int, Tensor]]:
        """Copies the gradients, by sub-group and place in it."""
        return {
            sub_group: {i: self.partition_of(param, write=False).float() for i, param in enumerate(params)}
            for sub_group, params in enumerate(self._layout.groups)
        }

    def for_state_api(self, param: Any, *, only_read: bool) -> tuple[Tensor, int]:
        """Returns one parameter's gradient and its sub-group, as DeepSpeed's functions that get and set it expect."""
        sub_group = self._driver.partitions[self._layout.key(param)].sub_group
        if only_read:
            return self.partition_of(param, write=False).float().clone(), sub_group
        return self.partition_of(param, write=True), sub_group
