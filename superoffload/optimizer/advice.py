"""Warnings that a step leads to, told once everything is in order: where warnings are errors, telling raises."""

from __future__ import annotations

import warnings


class Advice:
    """Keeps one optimizer's messages from when they are found until ``tell()``."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    def keep(self, message: str) -> None:
        self._messages.append(f"superoffload: {message}")

    def tell(self) -> None:
        """From the line that called ``step()``, beyond torch's two wrappers."""
        while self._messages:
            warnings.warn(self._messages.pop(0), RuntimeWarning, stacklevel=5)
