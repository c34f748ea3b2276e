"""``with optimizer.accumulate():``, and a warning for those who call it without ``with``, which would do nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Accumulates(Protocol):
    _accumulating: bool


class Accumulating(ContextDecorator):
    """Backward inside is not the boundary. Contexts nest; as it was before on leaving, also by an exception."""

    def __init__(self, optimizer: Accumulates) -> None:
        self._optimizer = optimizer
        self._before: list[bool] = []
        self._entered = False

    def __call__(self, function: F) -> F:
        self._entered = True
        return super().__call__(function)

    def __enter__(self) -> None:
        self._entered = True
        self._before.append(self._optimizer._accumulating)
        self._optimizer._accumulating = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._optimizer._accumulating = self._before.pop()

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                "superoffload: accumulate() was called without `with`, which does nothing; write "
                "`with optimizer.accumulate():` around every backward() of a step but the last",
                RuntimeWarning,
                stacklevel=2,
            )
