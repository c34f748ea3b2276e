"""Signals wait while a step's bookkeeping runs: Ctrl-C must not leave a step half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# SIGINT first, so that it is the last one to be let through again.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_held = False  # only the main thread, where Python runs signal handlers, gets to write it


@contextmanager
def held_signals() -> Iterator[None]:
    """Runs handlers written in Python once the body is done; a second signal of the same number goes through at once.

    So Ctrl-C still ends a program that hangs inside, and pressed once it arrives between two operations.
    """
    global _held
    if _held or threading.get_ident() != threading.main_thread().ident:
        yield
        return
    replaced: dict[int, Callable[[int, FrameType | None], object]] = {}
    caught: dict[int, FrameType | None] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        if number in caught:
            replaced[number](number, frame)
        caught[number] = frame

    try:
        _held = True
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                replaced[int(number)] = handler
                signal.signal(number, hold)
        yield
    finally:
        _held = False
        for number in reversed(_SIGNALS):
            if number in replaced:
                signal.signal(number, replaced[number])
        for caught_number, frame in caught.items():
            replaced[caught_number](caught_number, frame)
