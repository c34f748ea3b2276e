"""An optimizer is used from its construction to its end, by one thread at a time, in the process that made it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pkgutil import iter_modules
from typing import ParamSpec, Protocol, TypeVar

from superoffload.errors import StateError
from superoffload.host.signals import Alone, Closable, Uninterrupted, close_at_exit, forget_closed, held_signals

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def weakly(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result | None]:
    """Calls a bound method as long as its object lives; returns None afterwards."""
    reference = weakref.WeakMethod(method)

    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result | None:
        alive = reference()
        return alive(*args, **kwargs) if alive is not None else None

    return call


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
        keep_from_compiler()
        self._owner = weakref.ref(owner)
        self._owner_id = id(owner)
        self._open = self._ended = False
        self._partly_loaded = False  # from when a load begins to change the state until all of it is there
        self.work = Uninterrupted()  # ``whole()`` for callers who know that this is the process of the owner

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
        return self.work.is_over

    @property
    def asleep(self) -> bool:
        return self.work.rests

    def ends_with(self, owner: object) -> bool:
        """Returns whether ``owner`` is to be closed when it is freed.

        Lightning wraps an optimizer in an object of a derived class, which shares its attributes and is freed first. A
        closed optimizer is left alone: when the process ends, modules that closing uses may be gone.
        """
        return self._owner_id == id(owner) and not self.work.is_over

    # ---- work -------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> Alone:
        """Returns the context that admits one thread at a time, with signals held back."""
        return self.work.alone

    def whole(self) -> Uninterrupted:
        """Returns the context for work that must be done wholly or not at all; if it is cut off, later calls raise."""
        self._check_process()
        return self.work

    def check_usable(self, *, closed_too: bool = False, asleep_too: bool = False, to_load: bool = False) -> None:
        """Raises if the owner cannot be used. ``closed_too`` accepts one that is closed or asleep, whose state can be
        read; ``asleep_too`` one that is asleep; ``to_load`` a partial load."""
        if self.work.cut_off is not None:
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
        if self.work.is_over and not closed_too:
            raise StateError(
                "the optimizer is closed; make a new one, and load a checkpoint, or the state_dict() of this one, there"
            )
        if self.work.rests and not (closed_too or asleep_too):
            raise StateError("the optimizer is asleep since sleep(); call wake() first")

    def _check_process(self) -> None:
        if self.work.forked:  # another thread may have held the lock at fork()
            raise StateError(
                f"the optimizer was made in process {self.work.pid} and its worker threads do not survive fork(); "
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
        """Ends the threads and calls ``rest``, once: as Python ends, what closes again finds modules without names."""
        if self._ended:
            return
        with held_signals():
            try:
                self._close(threads)
            finally:
                self.work.end()
                rest()
                owner = self._owner()
                if owner is not None:
                    forget_closed(owner)
                self._ended = True

    def _close(self, threads: Threads) -> None:
        if self.work.forked:
            return
        with self.work:
            if self.work.cut_off is not None:
                threads.end_threads()
            elif not self.work.is_over:
                self.work.end()  # for threads that wait for the lock
                threads.close()


@cache
def keep_from_compiler() -> None:
    """Has torch.compile leave our code as it is, where a compiled function runs backward or ``step()``.

    By file: hooks of gradients run there too, and ``torch.compiler.disable`` takes microseconds to enter. Only hooks on
    modules are traced (module_hooks.py)."""
    from torch._dynamo import trace_rules  # here, since it takes a second; torch's own optimizers load it too

    package = Path(__file__).parents[1]
    for folder, traced in ((package, "optimizer"), (package / "optimizer", "module_hooks")):
        prefix = ".".join(folder.relative_to(package.parent).parts)
        for module in iter_modules([str(folder)]):
            if module.name != traced and hasattr(trace_rules, "add"):  # which is not public
                trace_rules.add(f"{prefix}.{module.name}")
