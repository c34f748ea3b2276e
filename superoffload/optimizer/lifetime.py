"""From construction to the end: what is in use, what was interrupted, closing, forking, leaving the process."""

from __future__ import annotations

import os
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from superoffload.closing import close_at_exit, is_closed
from superoffload.engine.engine import Engine
from superoffload.engine.recorder import Recorder
from superoffload.errors import StateError, SuperOffloadError
from superoffload.interrupts import held_signals

if TYPE_CHECKING:
    from typing_extensions import Self


class Alone:
    """A context for one thread at a time, without signals. Contexts nest.

    Signals are held first and let through last, so that no handler runs in a thread that has the lock.
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
    """Likewise, for what must be done wholly or not at all: it remembers what came out of the middle all the same."""

    def __init__(self) -> None:
        self.alone = Alone()
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


class Lifetime(Optimizer):
    """Whether the optimizer can be used, and how its use ends."""

    _core: Engine
    _recorder: Recorder
    _closed = False
    _partly_loaded = False  # from when a load begins to change the state until all of it is there

    def _begin(self) -> None:
        """First of all in the constructor."""
        self._pid = os.getpid()
        self._made_as = id(self)
        self._work = Whole()

    def _open(self) -> None:
        """Last of all in the constructor: from now on it is closed when the process ends."""
        close_at_exit(self)

    def _remove_hooks(self) -> None:
        """Those on what may outlive the optimizer; every layer removes its own."""

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads. The state stays readable."""
        with held_signals():
            try:
                self._close_core()
            finally:
                self._closed = True
                self._recorder.close()
                self._remove_hooks()
                is_closed(self)

    def _close_core(self) -> None:
        if self._pid != os.getpid():
            return
        with self._whole():
            if self._interrupted:
                self._core.end_threads()
            elif not self._closed:
                self._closed = True  # for threads that wait for the lock
                self._core.close()

    def __del__(self) -> None:
        # Lightning wraps an optimizer in an object of a derived class that shares its attributes and goes before it.
        # One that is closed is left alone: when the process ends, what close() uses may be gone.
        if hasattr(self, "_core") and self._made_as == id(self) and not self._closed:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)

    def _whole(self) -> Whole:
        """Around everything that must be done wholly or not at all. If it is cut off all the same, we say so."""
        self._check_process()
        return self._work

    @property
    def _interrupted(self) -> bool:
        return self._work.cut_off is not None

    def _out_of_use(self) -> bool:
        return self._closed or self._interrupted or self._pid != os.getpid()

    def _check_usable(self, *, closed_too: bool = False, to_load: bool = False) -> None:
        if self._interrupted:
            raise StateError(
                "the optimizer was interrupted in the middle of its work (see the error before this one) and its state "
                "cannot be trusted; make a new one and load the last checkpoint"
            ) from self._work.cut_off
        self._check_process()
        if self._partly_loaded and not to_load:
            raise StateError(
                "the optimizer's state was loaded in part: the load before this failed half-way (see its error); load "
                "a whole checkpoint, on every rank, and go on from that"
            )
        if self._closed and not closed_too:
            raise StateError("the optimizer is closed; make a new one and load the state_dict() of this one")

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # where the lock may be one that another thread had when the process was forked
            raise StateError(
                f"the optimizer was made in process {self._pid} and its worker threads do not survive fork(); "
                "make the optimizer in the process that trains"
            )
