"""``with optimizer.accumulate():``, and a warning for those who call it without ``with``, which would do nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Accumulating(ContextDecorator):
    """Backward inside is not the boundary, as long as ``contexts`` has any. They nest, also those of other threads."""

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
