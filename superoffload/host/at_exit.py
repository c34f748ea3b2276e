"""What is closed when the process ends: optimizers whose worker threads write to memory that would be gone."""

from __future__ import annotations

import atexit
import weakref
from contextlib import ExitStack
from typing import Protocol


class Closable(Protocol):
    """Anything with ``close()``, which may be called more than once."""

    def close(self) -> None: ...


_open: weakref.WeakSet[Closable] = weakref.WeakSet()
_registered = False


def close_at_exit(one: Closable) -> None:
    """Until then it is not kept alive."""
    global _registered
    if not _registered:  # not when this is imported: what is registered last is run first, before torch's own
        atexit.register(close_all)
        _registered = True
    _open.add(one)


def is_closed(one: Closable) -> None:
    """Nothing is left to do at the end."""
    _open.discard(one)


def close_all() -> None:
    """All of them, also where one raises; the error is raised once the others are closed."""
    with ExitStack() as stack:
        for one in list(_open):
            stack.callback(one.close)
