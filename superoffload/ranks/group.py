"""The ranks that share a verdict: a gloo group of our own, exchanges with a time-out, and who is missing after one.

Every exchange begins with one message of the same length, which says what it is about. So ranks that are in different
exchanges (one saves a checkpoint, the other steps) get an error that says so; gloo itself would mix up their data.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import time
import weakref
import zlib
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
FRAME = 128  # bytes of the message that every exchange begins with
_HEAD = struct.Struct("<IQ")  # a checksum of what the exchange is about, and how many bytes follow
ROOM = FRAME - _HEAD.size  # is left for the payload of a small exchange, which is that message alone
_ROLL_CALL = 0.2  # share of the time-out that is kept for finding out who is missing
_POLL_SECONDS = 0.05


def rank_timeout(value: float | None) -> float:
    """The argument, else the environment, else a minute; in seconds."""
    if value is not None:
        return check_number("rank_timeout", value, low=0.1)
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        raise ArgumentError(f"{TIMEOUT_VARIABLE}={text!r}: expected a number of seconds") from None
    return check_number(TIMEOUT_VARIABLE, seconds, low=0.1)


class Gather:
    """Equally long tensors of all ranks on their way, in the order of ranks."""

    def __init__(self, group: RankGroup, what: str, mine: Tensor) -> None:
        self._group, self._what = group, what
        self._parts = [torch.empty_like(mine) for _ in group.ranks]
        with group.naming_the_lost(what):
            self._work = dist.all_gather(self._parts, mine, group=group.gloo, async_op=True)

    def wait(self) -> list[Tensor]:
        with self._group.naming_the_lost(self._what):
            self._work.wait(timedelta(seconds=self._group.patience))
        return self._parts


class Exchange:
    """The first message of every rank on its way. ``follows``: bytes that this rank will send next."""

    def __init__(self, group: RankGroup, what: str, payload: bytes, follows: int = 0) -> None:
        self._group, self._what = group, what
        frame = _HEAD.pack(zlib.crc32(what.encode()), follows) + payload
        assert len(frame) <= FRAME
        self._gather = group.gather(what, torch.frombuffer(bytearray(frame.ljust(FRAME, b"\0")), dtype=torch.uint8))
        self.follows: list[int] = []

    def wait(self) -> list[bytes]:
        """What all ranks sent, filled up with zeros. RankError on all of them if they are in different exchanges."""
        frames = [part.numpy().tobytes() for part in self._gather.wait()]
        heads = [_HEAD.unpack_from(frame) for frame in frames]
        if len({kind for kind, _ in heads}) > 1:
            self._group.say_what_each_is_doing(self._what)
        self.follows = [follows for _, follows in heads]
        return [frame[_HEAD.size :] for frame in frames]


class RankGroup:
    """Ranks (global numbers, ascending) that exchange messages. All of them must make it, in the same order."""

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self.ranks = list(ranks)
        self._world = weakref.ref(_this_world())
        self.rank = dist.get_rank()
        self.timeout = timeout
        self.patience = timeout * (1.0 - _ROLL_CALL)
        self.failure: str | None = None
        self.sessions = 0
        whole_world = len(self.ranks) == dist.get_world_size()
        self.gloo = dist.new_group(
            self.ranks,
            timeout=timedelta(seconds=timeout),
            backend="gloo",
            use_local_synchronization=not whole_world,
        )
        self._calls = 0
        self._store: TCPStore | None = None
        self._store = self._open_store()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _open_store(self) -> TCPStore | None:
        """Where ranks say that they are alive once an exchange has failed. The first rank hosts it."""
        store = None
        first = self.rank == self.ranks[0]
        if first:
            with contextlib.suppress(RuntimeError, OSError):
                store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        ((host, port), *_) = self.exchange_objects("the roll call", (_host_of(self.rank), store.port if store else 0))
        if not first and port:
            with contextlib.suppress(RuntimeError, OSError):
                limit = timedelta(seconds=min(self.timeout, 5.0))
                store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
        return store

    def gather(self, what: str, mine: Tensor) -> Gather:
        if self.failure is not None:
            raise RankError(f"{self.failure} (this happened before; the ranks cannot go on together)")
        if not dist.is_initialized() or self._world() is not dist.group.WORLD:
            raise RankError(
                f"{what}: torch.distributed was ended (destroy_process_group()) since the optimizer was made, and with "
                "it the group over which its ranks exchange; make a new optimizer and load the state"
            )
        self._calls += 1
        return Gather(self, what, mine)

    def exchange(self, what: str, payload: bytes) -> Exchange:
        """Starts an exchange of at most ROOM bytes; ``what`` must be the same on all ranks, and is for errors too."""
        return Exchange(self, what, payload)

    def exchange_bytes(self, what: str, payload: bytes) -> list[bytes]:
        """Of any length, also different ones."""
        frame = Exchange(self, what, b"", len(payload))
        frame.wait()
        room = bytearray(payload.ljust(max(1, *frame.follows), b"\0"))
        parts = self.gather(what, torch.frombuffer(room, dtype=torch.uint8)).wait()
        return [part.numpy().tobytes()[:length] for part, length in zip(parts, frame.follows, strict=True)]

    def exchange_tensors(self, what: str, mine: Tensor) -> list[Tensor]:
        """A flat tensor of the same dtype and length from every rank."""
        frame = Exchange(self, what, b"", mine.numel() * mine.element_size())
        frame.wait()
        if len(set(frame.follows)) > 1:
            lengths = ", ".join(f"rank {r}: {n} bytes" for r, n in zip(self.ranks, frame.follows, strict=True))
            self._fail(f"{what}: not equally long on all ranks ({lengths}); all must have the same gradients")
        return self.gather(what, mine).wait()

    def exchange_objects(self, what: str, value: Any) -> list[Any]:
        """Any picklable value of every rank; not for every step."""
        return [pickle.loads(data) for data in self.exchange_bytes(what, pickle.dumps(value))]

    def say_what_each_is_doing(self, what: str) -> None:
        """Raises on every rank; all of them must call it."""
        text = bytearray(what.encode()[:FRAME].ljust(FRAME, b"\0"))
        told = self.gather(what, torch.frombuffer(text, dtype=torch.uint8)).wait()
        names = [part.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for part in told]
        doing = "; ".join(f"rank {rank}: {name}" for rank, name in zip(self.ranks, names, strict=True))
        self._fail(
            f"the ranks do different things: {doing}. Every rank must make the same calls in the same order: step(), "
            "add_param_group(), load_state_dict(), with spread state also state_dict(), for the same parameters"
        )

    def _fail(self, message: str) -> None:
        self.failure = message
        raise RankError(message)

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
        except RuntimeError:  # the store was in the first rank's process, which has ended; before its answer, or after?
            return [self.ranks[0]] if self.ranks[0] in missing else missing
        return missing


def _host_of(rank: int) -> str:
    """An address of this host for the other ranks: where everybody met already, if that was here."""
    meeting = os.environ.get("MASTER_ADDR", "localhost")
    return meeting if rank == 0 or meeting in ("localhost", "127.0.0.1", "::1") else socket.gethostname()


def _this_world() -> Any:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return world


# By what stands for everything that torch.distributed has between init_process_group() and destroy_process_group():
# groups of ours go with it.
_GROUPS: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], RankGroup]] = weakref.WeakKeyDictionary()


def rank_group(process_group: Any, timeout: float) -> RankGroup | None:
    """The group of ours over the ranks of ``process_group`` (None: all); made once. None where there is one rank."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        ranks = sorted(dist.get_process_group_ranks(process_group or _this_world()))
    except KeyError:
        raise ArgumentError(
            f"process_group={process_group!r}: not a group of this torch.distributed; was it made before "
            "destroy_process_group()? Expected one that was made since"
        ) from None
    if len(ranks) == 1:
        return None
    if dist.get_rank() not in ranks:
        raise ArgumentError(f"process_group={process_group!r}: rank {dist.get_rank()} is not in it; expected its own")
    groups = _GROUPS.setdefault(_this_world(), {})
    key = (tuple(ranks), timeout)
    kept = groups.get(key)
    if kept is None or kept.failure is not None:
        kept = groups[key] = RankGroup(ranks, timeout)
    return kept
