"""Optimizers of a process share worker threads, so that two hundred of them do not start two hundred times as many."""

from __future__ import annotations

import os
import threading
from weakref import WeakValueDictionary

from superoffload import _native

_lock = threading.Lock()
_pools: WeakValueDictionary[tuple[int, ...], _native.WorkerPool] = WeakValueDictionary()


def shared_pool(cpus: list[int]) -> _native.WorkerPool:
    """Returns the worker pool of this process with one thread per entry of ``cpus``, as ``WorkerPool`` reads them.

    Its threads end with the last reference to it, so its ``close()`` is not for the optimizers that share it. Raises
    SuperOffloadError if the system starts no more threads.
    """
    key = tuple(cpus)
    with _lock:
        pool = _pools.get(key)
        if pool is None:
            pool = _native.WorkerPool(cpus)
            _pools[key] = pool
        return pool


def _forget_in_child() -> None:
    """Leaves the pools to the parent, whose threads they are; another thread may have held the lock at fork()."""
    global _lock, _pools
    _lock = threading.Lock()
    _pools = WeakValueDictionary()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
