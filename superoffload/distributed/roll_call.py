"""Finds the ranks that are missing after a failed exchange, and bounds waits that torch cannot bound.

``TCPStore`` waits without end for the answer of a host behind a broken link, and so does ``new_group()``, which asks
such a store. So both are called in threads of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's annotations leave it out

from superoffload.distributed.hosts import Hosts

GRACE = 1.0  # seconds that a call with its own time-out gets to notice that it is over
_MOST_SECONDS = 5.0
_POLL_SECONDS = 0.05

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Runs ``work`` for at most so many seconds, then raises TimeoutError: its thread ends with the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="superoffload bounded wait", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return future.result()


class RollCall:
    """Finds the ranks that still answer, by a store that the first rank hosts at ``address`` and the others ``join()``.
    ``seconds``: how long a rank waits for the others to answer."""

    def __init__(self, ranks: Sequence[int], rank: int, seconds: float) -> None:
        self.ranks, self.rank, self.seconds = list(ranks), rank, min(seconds, _MOST_SECONDS)
        self._store: TCPStore | None = None
        self._hosted: TCPStore | None = None
        self.address = (_host_of(rank), 0)
        if rank == self.ranks[0]:
            with contextlib.suppress(RuntimeError, OSError):
                self._hosted = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
                self.address = (_host_of(rank), self._hosted.port)

    def join(self, address: tuple[str, int], timeout: float) -> None:
        """Connects to the address that the first rank sent; port 0: it has none."""
        self.address = (host, port) = address
        if self._hosted is not None or not port:
            self._store = self._hosted
            return
        limit = min(timeout, _MOST_SECONDS)

        def connect() -> TCPStore:
            return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit), wait_for_workers=False)

        with contextlib.suppress(RuntimeError, OSError):  # TimeoutError is an OSError
            self._store = within(limit + GRACE, connect)

    def who_is_missing(self, call: int, hosts: Hosts) -> tuple[list[int], str]:
        """Returns the ranks that do not answer ``call``, and a text on what was unreachable. The ranks' own output
        tells what they do instead."""
        first, host = self.ranks[0], self.address[0]
        store = self._store
        missing = [rank for rank in self.ranks if rank != self.rank]
        if store is None:
            return (
                [],
                f"; the roll call of rank {first} on {host} was not reached before, so it is not known who is missing",
            )
        deadline = time.monotonic() + self.seconds
        heard: set[int] = set()  # filled by the thread, and read even if that never returns

        def ask() -> None:
            store.set(f"{call}/{self.rank}", "here")
            while True:
                heard.update({rank for rank in missing if rank not in heard and store.check([f"{call}/{rank}"])})
                if len(heard) == len(missing) or time.monotonic() > deadline:
                    return
                time.sleep(_POLL_SECONDS)

        try:
            within(self.seconds + GRACE, ask)
        except (RuntimeError, TimeoutError) as error:
            # The first rank's process held the store; it has ended, before its answer or after, or is cut off.
            silent = [rank for rank in missing if rank not in heard]
            if first not in silent:
                return silent, ""
            why = "could not be reached" if isinstance(error, TimeoutError) else "has ended"
            rest = [rank for rank in silent if rank != first]
            unknown = f", so nothing is known of {hosts.ranks(rest)}" if rest else ""
            return [first], f"; the roll call of rank {first} on {host} {why}{unknown}"
        return [rank for rank in missing if rank not in heard], ""


def _host_of(rank: int) -> str:
    """Returns an address of this host for the other ranks: MASTER_ADDR, where all ranks met, if it is this host."""
    meeting = os.environ.get("MASTER_ADDR", "localhost")
    return meeting if rank == 0 or meeting in ("localhost", "127.0.0.1", "::1") else socket.gethostname()
