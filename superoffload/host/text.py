"""Shows text and values from outside, such as names in a file, on one line and in bounded length."""

from __future__ import annotations

import reprlib
from typing import Any


def shown(value: Any) -> str:
    """Shows some of a value of any size and depth on one line, in little time."""
    return shortened(reprlib.repr(value))


def shortened(text: str) -> str:
    return printable(text if len(text) <= 200 else f"{text[:100]}...{text[-100:]}")


def printable(text: str) -> str:
    """Escapes characters that steer a terminal, turn a line's direction or are no valid text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
