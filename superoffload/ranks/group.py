"""The ranks that share a verdict: a gloo group of our own, exchanges with a time-out, and who is missing after one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from superoffload.arguments import check_number
from superoffload.errors import ArgumentError, RankError

DEFAULT_TIMEOUT = 60.0
TIMEOUT_VARIABLE = "SUPEROFFLOAD_RANK_TIMEOUT"
_ROLL_CALL = 0.2  # share of the time-out that is kept for finding out who is missing
_POLL_SECONDS = 0.05


def rank_timeout(value: float | None) -> float:
    """The argument, else the environment, else a minute; in seconds."""
    if value is None:
        text = os.environ.get(TIMEOUT_VARIABLE)
        if text is None:
            return DEFAULT_TIMEOUT
        with contextlib.suppress(ValueError):
            value = float(text)
        if value is None:
            raise ArgumentError(f"{TIMEOUT_VARIABLE}={text!r}: expected a number of seconds")
    return check_number("rank_timeout", value, low=0.1)


class Exchange:
    """Bytes of every rank on their way, in the order of ranks."""

    def __init__(self, group: RankGroup, what: str, mine: Tensor) -> None:
        self._group, self._what = group, what
        self._parts = [torch.empty_like(mine) for _ in group.ranks]
        with group.naming_the_lost(what):
            self._work = dist.all_gather(self._parts, mine, group=group.gloo, async_op=True)

    def tensors(self) -> list[Tensor]:
        with self._group.naming_the_lost(self._what):
            self._work.wait(timedelta(seconds=self._group.patience))
        return self._parts

    def wait(self) -> list[bytes]:
        return [part.numpy().tobytes() for part in self.tensors()]


class RankGroup:
    """Ranks (global numbers, ascending) that exchange small messages. All of them must make it, in the same order."""

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self.ranks = list(ranks)
        self.rank = dist.get_rank()
        self.timeout = timeout
        self.patience = timeout * (1.0 - _ROLL_CALL)
        self.failure: str | None = None
        whole_world = len(self.ranks) == dist.get_world_size()
        self.gloo = dist.new_group(
            self.ranks,
            timeout=timedelta(seconds=timeout),
            backend="gloo",
            use_local_synchronization=not whole_world,
        )
        self._calls = 0
        self._store = self._open_store()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _open_store(self) -> TCPStore | None:
        """Where ranks say that they are alive once an exchange has failed. The first rank hosts it."""
        host = os.environ.get("MASTER_ADDR", "localhost")
        store = None
        first = self.rank == self.ranks[0]
        if first:
            with contextlib.suppress(RuntimeError, OSError):
                store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        (port, *_) = self.exchange_objects("the roll call", store.port if store else 0)
        if not first and port:
            with contextlib.suppress(RuntimeError, OSError):
                limit = timedelta(seconds=min(self.timeout, 5.0))
                store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        return store

    def exchange(self, what: str, payload: bytes) -> Exchange:
        """Starts an exchange of equally long messages; ``what`` is for errors."""
        self._raise_failure()
        self._calls += 1
        return Exchange(self, what, torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def exchange_tensors(self, what: str, mine: Tensor) -> list[Tensor]:
        """A flat tensor of the same dtype and length from every rank."""
        self._raise_failure()
        self._calls += 1
        return Exchange(self, what, mine).tensors()

    def exchange_objects(self, what: str, value: Any) -> list[Any]:
        """Any picklable value of every rank; not for every step."""
        self._raise_failure()
        self._calls += 1
        values: list[Any] = [None] * self.size
        with self.naming_the_lost(what):
            dist.all_gather_object(values, value, group=self.gloo)
        return values

    @contextlib.contextmanager
    def naming_the_lost(self, what: str) -> Iterator[None]:
        """Turns what gloo raises into a RankError that names the ranks that are missing."""
        try:
            yield
        except RuntimeError as error:
            missing = self._missing()
            who = f"rank {', '.join(map(str, missing))} did not take part" if missing else "the connection broke"
            self.failure = (
                f"{what}: {who} within {self.timeout:g} s (seen from rank {self.rank}). The ranks that still run must "
                f"be restarted from the last checkpoint. [{str(error).splitlines()[0]}]"
            )
            raise RankError(self.failure) from error

    def _missing(self) -> list[int]:
        """Ranks that do not answer the roll call; what they were doing instead, their own output tells."""
        if self._store is None:
            return []
        deadline = time.monotonic() + min(self.timeout * _ROLL_CALL, 5.0)
        prefix = f"{self._calls}/"
        missing = [rank for rank in self.ranks if rank != self.rank]
        try:
            self._store.set(f"{prefix}{self.rank}", "here")
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._store.check([f"{prefix}{rank}"])]
                time.sleep(_POLL_SECONDS)
        except RuntimeError:  # the store was in the first rank's process
            return [self.ranks[0]]
        return missing

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RankError(f"{self.failure} (this happened before; the ranks cannot go on together)")


_GROUPS: dict[tuple[Any, ...], tuple[Any, RankGroup]] = {}


def rank_group(process_group: Any, timeout: float) -> RankGroup | None:
    """The group of ours over the ranks of ``process_group`` (None: all); made once. None where there is one rank."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    ranks = sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    if len(ranks) == 1:
        return None
    if dist.get_rank() not in ranks:
        raise ArgumentError(f"process_group={process_group!r}: rank {dist.get_rank()} is not in it; expected its own")
    world = dist.group.WORLD
    key = (id(world), tuple(ranks), timeout)
    kept = _GROUPS.get(key)
    if kept is None or kept[1].failure is not None:
        kept = _GROUPS[key] = (world, RankGroup(ranks, timeout))  # holds the world: its id must not come again
    return kept[1]
