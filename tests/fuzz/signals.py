"""Signals that come while a chosen line of superoffload's is about to run, so that a seed repeats them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


class LineSignals:
    """Counts lines of superoffload as they are run, and sends the signal when so many have been, then so many more.

    ``where``: of files whose path ends so.
    """

    def __init__(self, number: signal.Signals, lines: Sequence[int], where: str) -> None:
        self._number = number
        self._left = list(lines)
        self._where = where
        self.sent = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        return self._line if path.startswith(_PACKAGE) and path.endswith(self._where) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self._left:
            self._left[0] -= 1
            if self._left[0] <= 0:
                self._left.pop(0)
                self.sent += 1
                signal.raise_signal(self._number)
        return self._line


@dataclass
class Interrupt:
    """What came of the signals of one operation."""

    sent: int = 0
    raised: list[str] = field(default_factory=list)


@contextmanager
def signals_of(op: Op) -> Iterator[Interrupt]:
    """SIGINT raises KeyboardInterrupt, SIGTERM ``Terminated``, which end the body and go no further.

    Raises AssertionError where these handlers are not reached any more afterwards.
    """
    sender = LineSignals(signal.Signals[op["signal"]], op["lines"], op.get("where", ""))
    interrupt = Interrupt()
    before = sys.gettrace()
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, _terminate),
    }
    try:
        sys.settrace(sender.trace)
        try:
            yield interrupt
        except (KeyboardInterrupt, Terminated) as error:
            interrupt.raised.append(type(error).__name__)
        finally:
            sys.settrace(before)
            interrupt.sent = sender.sent
        for number in handlers:
            if not _is_answered(number):
                raise AssertionError(f"handlers of signals: {number.name} is lost after {op}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_answered(number: signal.Signals) -> bool:
    try:
        signal.raise_signal(number)
    except (KeyboardInterrupt, Terminated):
        return True
    return False
