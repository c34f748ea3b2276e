"""Warnings about a step wait until it has ended, since a warning raises where warnings are errors."""

from __future__ import annotations

import warnings


class Advice:
    """Keeps the warnings of one optimizer until ``tell()``."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    def keep(self, message: str) -> None:
        self._messages.append(f"superoffload: {message}")

    def tell(self) -> None:
        """Warns with the line that called ``step()``, which is above two wrappers of torch."""
        while self._messages:
            warnings.warn(self._messages.pop(0), RuntimeWarning, stacklevel=5)
