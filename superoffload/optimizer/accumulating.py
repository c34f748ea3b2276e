"""A backward ``with optimizer.accumulate():``, or in a window of Accelerate's, is not the boundary."""

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
    """Backward inside is not the boundary, as long as ``contexts`` has any. They nest, also those of other threads.

    One that is called without ``with`` does nothing, and warns of that.
    """

    _entered = True  # where Ctrl-C comes before the constructor, there is nothing to warn of

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
    """Knows whether gradients only add up now."""

    def __init__(self) -> None:
        self.contexts: list[Accumulating] = []  # those that are open, in any thread
        self._window = Window()

    def context(self) -> Accumulating:
        return Accumulating(self.contexts)

    @property
    def is_asked_for(self) -> bool:
        """By ``accumulate()``."""
        return bool(self.contexts)

    def is_of_a_window(self) -> bool:
        """Whether Accelerate says so."""
        return self._window.more_to_come()

    def step_begins(self, advice: Advice) -> None:
        self._window.step_begins(advice)
