"""Bookkeeping is done wholly or not at all: signals wait meanwhile, and other threads.

So Ctrl-C, pressed any number of times, leaves no step half-way.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeAlias

from superoffload.errors import SuperOffloadError

P = ParamSpec("P")
_Handler: TypeAlias = Callable[[int, FrameType | None], object]

# What users, launchers and schedulers send to end a run or to have it saved, and the timers whose handlers raise.
# SIGINT first, so that it is the last one to be let through again.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF")
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
_NOTICE = (
    b"superoffload: the signal is answered once the work in progress is whole, so that its state can be saved; "
    b"SIGQUIT (Ctrl-\\) ends the process at once\n"
)

# What the module signal wraps: its conversions to enums take ten times as long as all the rest, at every gradient.
_fast: Any = importlib.import_module("_signal")

_main = threading.main_thread().ident  # Python runs handlers in this thread, and only it writes what follows
_depth = 0
_replaced: dict[int, _Handler] = {}  # what ``_hold`` stands for
_waiting: dict[int, FrameType | None] = {}  # came while signals were held


def _hold(number: int, frame: FrameType | None) -> None:
    if not _depth:  # on the way in or out
        _waiting.pop(number, None)  # one answer for both
        try:
            _replaced[number](number, frame)
        except BaseException:  # there it goes no further
            _give_back()
            raise
    elif number not in _waiting:
        _waiting[number] = frame
    elif os.isatty(2):  # again, from the keyboard; by a system call, since a handler may have interrupted print()
        os.write(2, _NOTICE)


def _take_over() -> None:
    for number in _SIGNALS:
        handler = _fast.getsignal(number)
        if callable(handler) and handler is not _hold:
            _replaced[number] = handler
            _fast.signal(number, _hold)


def _give_back() -> None:
    """Handlers may raise between any two lines: what is left here then is seen to by the next bookkeeping."""
    try:
        _let_through()
    finally:
        for number in reversed(_SIGNALS):
            if _fast.getsignal(number) is _hold:
                _fast.signal(number, _replaced[number])


def _let_through() -> None:
    if not _waiting:
        return
    number = next(iter(_waiting))
    try:
        _hold(number, _waiting.get(number))
    finally:
        _let_through()


class HeldSignals:
    """A context in which no handler written in Python runs; those whose signal came meanwhile run at its end.

    However many come: what is cut off half-way can never be saved again. Everything inside ends in bounded time.
    Contexts nest, and one object serves any number of them.
    """

    def __enter__(self) -> None:
        global _depth
        if threading.get_ident() == _main:
            if not _depth:
                _take_over()
            _depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _depth
        if threading.get_ident() == _main:
            _depth -= 1
            if not _depth:
                _give_back()


_HELD = HeldSignals()


def held_signals() -> HeldSignals:
    """``with held_signals():`` around what must be done wholly or not at all."""
    return _HELD


class Alone:
    """Lets one thread at a time in, without signals. Contexts nest.

    Signals are held first and let through last, so that no handler runs in a thread that has the lock.
    """

    def __init__(self) -> None:
        self._held = held_signals()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._held.__enter__()
        try:
            self._lock.acquire()
        except BaseException:
            self._held.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._lock.release()
        finally:
            self._held.__exit__(kind, error, traceback)


class Whole:
    """Lets one thread at a time do what must be done wholly or not at all; remembers an error from the middle of it.

    ``pid``: the process where that can be done. ``is_over``: it is not done any more.
    """

    def __init__(self) -> None:
        self.alone = Alone()
        self.pid = os.getpid()
        self.is_over = False
        self.cut_off: BaseException | None = None

    def __enter__(self) -> None:
        self.alone.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # One of ours is raised after everything was put in order.
        if error is not None and not isinstance(error, SuperOffloadError):
            self.cut_off = error
        self.alone.__exit__(kind, error, traceback)

    @property
    def forked(self) -> bool:
        """Whether this process is a copy of that which ``pid`` names, and none of its threads run here."""
        return self.pid != os.getpid()

    def out_of_use(self) -> bool:
        """Asked at every gradient that completes a bucket."""
        return self.is_over or self.cut_off is not None or self.forked

    def if_in_use(self, work: Callable[P, object], *args: P.args, **named: P.kwargs) -> None:
        """Calls ``work``, alone, unless it is out of use."""
        if not self.out_of_use():
            with self:
                if not self.out_of_use():  # since another thread had the lock
                    work(*args, **named)

    def end(self) -> None:
        """It is over."""
        self.is_over = True


def _after_fork() -> None:
    """In a child that another thread has forked, which is its main thread: what was held goes on in the parent only."""
    global _depth, _main
    if threading.get_ident() != _main:
        _main = threading.get_ident()
        _depth = 0
        _waiting.clear()
        _give_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
