"""An optimizer is used from its construction to its end, by one thread at a time, in the process that made it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import TracebackType
from typing import Protocol

from superoffload.errors import StateError, SuperOffloadError
from superoffload.host.at_exit import Closable, close_at_exit, is_closed
from superoffload.host.signals import held_signals


class Alone:
    """Admits one thread at a time, with signals held back. Contexts nest.

    Signals are held before the lock is taken and until it is released, so no handler runs in a thread that has it.
    """

    def __init__(self) -> None:
        self._held = held_signals()
        self._lock = RLock()

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
    """Admits one thread at a time to work that must be done wholly or not at all; remembers an error inside."""

    def __init__(self) -> None:
        self.alone = Alone()
        self.cut_off: BaseException | None = None

    def __enter__(self) -> None:
        self.alone.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A SuperOffloadError is raised only after the state was put in order.
        if error is not None and not isinstance(error, SuperOffloadError):
            self.cut_off = error
        self.alone.__exit__(kind, error, traceback)


class Threads(Protocol):
    """Works for an optimizer in other threads."""

    def close(self) -> None:
        """Takes back unfinished work and ends the threads."""

    def end_threads(self) -> None:
        """Ends the threads and changes nothing else, since the state cannot be trusted."""


class Lifetime:
    """Knows whether its owner, an optimizer, can be used; admits one thread at a time to it; closes it once.

    It does not keep the owner alive.
    """

    def __init__(self, owner: Closable) -> None:
        self._pid = os.getpid()
        self._owner = weakref.ref(owner)
        self._owner_id = id(owner)
        self._open = False
        self._closed = False
        self._partly_loaded = False  # a load has changed some of the state and not ended
        self.work = Whole()  # ``whole()`` without the check of the process

    def open(self) -> None:
        """Marks the owner as constructed, and has it closed when the process ends."""
        self._open = True
        owner = self._owner()
        if owner is not None:
            close_at_exit(owner)

    @property
    def is_open(self) -> bool:
        """Returns whether the owner's constructor has ended."""
        return self._open

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def forked(self) -> bool:
        """Returns whether this process is a fork of the owner's, in which none of its threads run."""
        return self._pid != os.getpid()

    @property
    def interrupted(self) -> bool:
        return self.work.cut_off is not None

    def ends_with(self, owner: object) -> bool:
        """Returns whether ``owner`` is to be closed when it is freed.

        Lightning wraps an optimizer in an object of a derived class, which shares its attributes and is freed first. A
        closed optimizer is left alone: when the process ends, modules that closing uses may be gone.
        """
        return self._owner_id == id(owner) and not self._closed

    # ---- work -------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> Alone:
        """Returns the context that admits one thread at a time, with signals held back."""
        return self.work.alone

    def whole(self) -> Whole:
        """Returns the context for work that must be done wholly or not at all; if it is cut off, later calls raise."""
        self._check_process()
        return self.work

    def out_of_use(self) -> bool:
        """Returns whether the owner is closed, interrupted or forked. Every gradient asks, so this is fast."""
        return self._closed or self.work.cut_off is not None or self._pid != os.getpid()

    def if_in_use(self, work: Callable[[], None]) -> None:
        """Does ``work`` wholly or not at all, unless the owner is out of use."""
        if not self.out_of_use():
            with self.work:
                if not self.out_of_use():  # another thread may have had the lock
                    work()

    def check_usable(self, *, closed_too: bool = False, to_load: bool = False) -> None:
        """Raises if the owner cannot be used. ``closed_too`` accepts a closed one, ``to_load`` a partial load."""
        if self.interrupted:
            raise StateError(
                "the optimizer was interrupted in the middle of its work (see the error before this one) and its state "
                "cannot be trusted; make a new one and load the last checkpoint"
            ) from self.work.cut_off
        self._check_process()
        if self._partly_loaded and not to_load:
            raise StateError(
                "the optimizer's state was loaded in part: the load before this failed half-way (see its error); load "
                "a whole checkpoint, on every rank, and go on from that"
            )
        if self._closed and not closed_too:
            raise StateError("the optimizer is closed; make a new one and load the state_dict() of this one")

    def _check_process(self) -> None:
        if self.forked:  # the lock may be held forever by a thread that only the parent has
            raise StateError(
                f"the optimizer was made in process {self._pid} and its worker threads do not survive fork(); "
                "make the optimizer in the process that trains"
            )

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surrounds changes of the state that belong together: an error inside leaves a partial load."""
        self._partly_loaded = True
        yield
        self._partly_loaded = False

    # ---- the end ----------------------------------------------------------------------------------------------

    def close(self, threads: Threads, rest: Callable[[], None]) -> None:
        """Ends the threads of this process and calls ``rest``, which may be called more than once."""
        with held_signals():
            try:
                self._close(threads)
            finally:
                self._closed = True
                rest()
                owner = self._owner()
                if owner is not None:
                    is_closed(owner)

    def _close(self, threads: Threads) -> None:
        if self.forked:
            return
        with self.work:
            if self.interrupted:
                threads.end_threads()
            elif not self._closed:
                self._closed = True  # before threads that wait for the lock get it
                threads.close()
