"""Closes optimizers when the process ends, since their worker threads write to memory that is about to go."""

from __future__ import annotations

import atexit
import weakref
from contextlib import ExitStack
from typing import Protocol


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


def is_closed(one: Closable) -> None:
    """Forgets the object, since it is closed already."""
    _open.discard(one)


def close_all() -> None:
    """Closes every object, also where one raises; raises the error once the others are closed."""
    with ExitStack() as stack:
        for one in list(_open):
            stack.callback(one.close)
