"""A backward inside ``with optimizer.accumulate():``, or in a window of Accelerate, is not the boundary."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, TypeVar

from superoffload.optimizer.accelerate_window import Window
from superoffload.optimizer.advice import Advice

F = TypeVar("F", bound=Callable[..., Any])


class Accumulating(ContextDecorator):
    """Adds itself to ``contexts`` while it is entered: then no backward is the boundary. Contexts nest.

    One that is never entered does nothing, and warns when it is freed.
    """

    _entered = True  # no warning if an interrupt comes before the constructor

    def __init__(self, contexts: list[Accumulating]) -> None:
        self._contexts = contexts
        self._entered = False

    def __call__(self, function: F) -> F:
        self._entered = True
        return super().__call__(function)

    def __enter__(self) -> None:
        self._entered = True
        self._contexts.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.pop()

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                "superoffload: accumulate() was called without `with`, which does nothing; write "
                "`with optimizer.accumulate():` around every backward() of a step but the last",
                RuntimeWarning,
                stacklevel=2,
            )


class Accumulation:
    """Knows whether gradients accumulate now."""

    def __init__(self) -> None:
        self.contexts: list[Accumulating] = []  # open ones, of all threads
        self._window = Window()

    def context(self) -> Accumulating:
        return Accumulating(self.contexts)

    @property
    def is_asked_for(self) -> bool:
        """Returns whether an ``accumulate()`` context is open."""
        return bool(self.contexts)

    def is_of_a_window(self) -> bool:
        """Returns whether a window of Accelerate is open."""
        return self._window.more_to_come()

    def step_begins(self, advice: Advice) -> None:
        self._window.step_begins(advice)
