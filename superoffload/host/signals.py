"""Holds signals and other threads back while bookkeeping changes, so that it is done wholly or not at all.

So Ctrl-C, pressed any number of times, leaves no step half-way.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Protocol, TypeAlias

from superoffload.errors import SuperOffloadError

P = ParamSpec("P")
_Handler: TypeAlias = Callable[[int, FrameType | None], object]

# Users, launchers and schedulers send these to end or save a run, and handlers of the timers may raise. SIGINT is
# first, so that it is let through again last.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF")
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
_NOTICE = (
    b"superoffload: the signal is answered once the work in progress is whole, so that its state can be saved; "
    b"SIGQUIT (Ctrl-\\) ends the process at once\n"
)

# The module ``signal`` wraps this one. Its conversions to enums take ten times as long as all other work here.
_fast: Any = importlib.import_module("_signal")

_main = threading.main_thread().ident  # Python runs handlers in this thread, and only it writes the variables below
_depth = 0
_replaced: dict[int, _Handler] = {}  # the handlers in whose place ``_hold`` stands
_waiting: dict[int, FrameType | None] = {}  # signals that came while signals were held


def _hold(number: int, frame: FrameType | None) -> None:
    if not _depth:  # while signals are taken over or given back
        _waiting.pop(number, None)  # one answer for a signal that came twice
        try:
            _replaced[number](number, frame)
        except BaseException:  # Python must not continue with handlers still replaced
            _give_back()
            raise
    elif number not in _waiting:
        _waiting[number] = frame
    elif os.isatty(2):  # a repeated key press; os.write, since a handler may have interrupted print()
        os.write(2, _NOTICE)


def _take_over() -> None:
    for number in _SIGNALS:
        handler = _fast.getsignal(number)
        if callable(handler) and handler is not _hold:
            _replaced[number] = handler
            _fast.signal(number, _hold)


def _give_back() -> None:
    """Restores the handlers. A handler may raise between any two lines; the next bookkeeping does what is left here."""
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
    """Runs no handler written in Python inside; handlers of signals that came meanwhile run at its end.

    This holds for any number of signals, since a step that was cut off half-way cannot be saved. Everything inside ends
    in bounded time. Contexts nest, and one object serves any number of them.
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
    """Returns the context for work that must be done wholly or not at all."""
    return _HELD


class Alone:
    """Admits one thread at a time, with signals held back. Contexts nest.

    Signals are held before the lock is taken and until it is released, so no handler runs in a thread that has it.
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


class Uninterrupted:
    """Lets one thread at a time do what must be done wholly or not at all; remembers an error from the middle of it.

    ``pid``: the process where that can be done. ``is_over``: it is not done any more. ``rests``: not for now.
    """

    def __init__(self) -> None:
        self.alone = Alone()
        self.pid = os.getpid()
        self.is_over = False
        self.rests = False
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
        return self.is_over or self.rests or self.cut_off is not None or self.forked

    def if_in_use(self, work: Callable[P, object], *args: P.args, **named: P.kwargs) -> None:
        """Calls ``work``, alone, unless it is out of use."""
        if not self.out_of_use():
            with self:
                if not self.out_of_use():  # since another thread had the lock
                    work(*args, **named)

    def rest(self) -> None:
        """It is not done until ``go_on()``."""
        self.rests = True

    def go_on(self) -> None:
        self.rests = False

    def end(self) -> None:
        """It is over."""
        self.is_over = True


def _after_fork() -> None:
    """Resets the state in a child that another thread forked: held work goes on in the parent only."""
    global _depth, _main
    if threading.get_ident() != _main:
        _main = threading.get_ident()
        _depth = 0
        _waiting.clear()
        _give_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---- the end of the process -----------------------------------------------------------------------------------------
# Optimizers are closed when it comes, since their worker threads write to memory that is about to go.


class Closable(Protocol):
    """Has a ``close()`` that may be called more than once."""

    def close(self) -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_registered = False


def close_at_exit(one: Closable) -> None:
    """Closes the object when the process ends. Holds only a weak reference to it until then."""
    global _registered
    if not _registered:  # registered late, since the last registration runs first: before torch's own
        atexit.register(close_all)
        _registered = True
    _open.add(one)


def forget_closed(one: Closable) -> None:
    """Forgets the object, since it is closed already."""
    _open.discard(one)


def close_all() -> None:
    """Closes every object, also where one raises; raises the error once the others are closed."""
    with ExitStack() as stack:
        for one in list(_open):
            stack.callback(one.close)
