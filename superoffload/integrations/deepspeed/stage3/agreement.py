"""Compares ranks: settings and failures before a step, a part of the published parameters after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from superoffload.distributed.session import RankSession
from superoffload.errors import WorkerError
from superoffload.integrations.deepspeed.driver import PartitionDriver, Window


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


class Ranks(Protocol):
    """Agrees on a step, and compares its results."""

    def begin(self) -> None: ...
    def exchange(self, window: Window) -> Sequence[float]: ...
    def fail(self) -> None: ...
    def ended(self, *, applied: bool, factor: float) -> None: ...
    def look(self) -> None: ...
    def forget_look(self) -> None: ...
    def check(self, *, later: bool) -> None: ...
    def loaded(self, steps: int) -> None: ...


class OneRank:
    """Decides alone; there is nothing to agree on."""

    def begin(self) -> None: ...

    def exchange(self, window: Window) -> Sequence[float]:
        return list(window.sums.values())

    def fail(self) -> None: ...

    def ended(self, *, applied: bool, factor: float) -> None: ...

    def look(self) -> None: ...

    def forget_look(self) -> None: ...

    def check(self, *, later: bool) -> None: ...

    def loaded(self, steps: int) -> None: ...


class Agreement:
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
    return OneRank() if session is None else Agreement(session, driver, settings)
