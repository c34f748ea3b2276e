"""Signals that come while a chosen line of superoffload's is about to run, so that a seed repeats them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import superoffload
from tests.fuzz.program import Op

_PACKAGE = str(Path(superoffload.__file__).parent)


class Terminated(BaseException):
    """What this program's handler of SIGTERM raises."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


@dataclass
class Interrupt:
    """What came of the signals of one operation."""

    sent: int = 0
    raised: list[str] = field(default_factory=list)


@contextmanager
def signals_of(op: Op) -> Iterator[Interrupt]:
    """Counts lines of superoffload (``where``: of files whose path ends so) as they are run, and sends the signal when
    so many have been, then so many more. SIGINT raises KeyboardInterrupt, SIGTERM ``Terminated``, which end the body
    and go no further. Raises AssertionError where these handlers are not reached any more afterwards.
    """
    interrupt, left, before = Interrupt(), list(op["lines"]), sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        return on_line if path.startswith(_PACKAGE) and path.endswith(op.get("where", "")) else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and left:
            left[0] -= 1
            if left[0] <= 0:
                left.pop(0)
                interrupt.sent += 1
                signal.raise_signal(signal.Signals[op["signal"]])
        return on_line

    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, _terminate),
    }
    try:
        sys.settrace(trace)
        try:
            yield interrupt
        except (KeyboardInterrupt, Terminated) as error:
            interrupt.raised.append(type(error).__name__)
        finally:
            sys.settrace(before)
        for number in handlers:
            with suppress(KeyboardInterrupt, Terminated):
                signal.raise_signal(number)
                raise AssertionError(f"handlers of signals: {number.name} is lost after {op}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
