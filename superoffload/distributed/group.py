"""The ranks that share a verdict exchange messages over a gloo group of our own, with a time-out that names the lost.

Every exchange begins with one message of fixed length that names the exchange. So ranks that are in different exchanges
(one saves a checkpoint, another steps) get an error that says so; gloo itself would mix up their data.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's annotations leave it out

from superoffload.errors import ArgumentError, RankError
from superoffload.host.numbers import check_number


class Hosts:
    """Holds the name of every rank's host. ``{}``: not known yet."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names if len(set(names.values())) > 1 else {}

    def rank(self, rank: int) -> str:
        """Returns "rank 1", with several hosts "rank 1 on gpu-07"."""
        return self.ranks([rank])

    def ranks(self, ranks: Iterable[int]) -> str:
        """Returns "rank 1, 2, 5", with several hosts "rank 1, 2 on gpu-07, rank 5 on gpu-09"."""
        by_host: dict[str, list[str]] = {}
        for rank in ranks:
            by_host.setdefault(self._names.get(rank, ""), []).append(str(rank))
        return ", ".join(f"rank {', '.join(some)}{f' on {host}' * bool(host)}" for host, some in by_host.items())


# ---- missing ranks and bounded waits --------------------------------------------------------------------------------
# ``TCPStore`` waits without end for the answer of a host behind a broken link, and so does ``new_group()``, which asks
# such a store. So both are called in threads of their own.

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
            unknown = "was not reached before, so it is not known who is missing"
            return [], f"; the roll call of rank {first} on {host} {unknown}"
        deadline, heard = time.monotonic() + self.seconds, set[int]()  # the thread fills it, and may never return

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
            silent.remove(first)
            others = f", so nothing is known of {hosts.ranks(silent)}" if silent else ""
            return [first], f"; the roll call of rank {first} on {host} {why}{others}"
        return [rank for rank in missing if rank not in heard], ""


def _host_of(rank: int) -> str:
    """Returns an address of this host for the other ranks: MASTER_ADDR, where all ranks met, if it is this host."""
    meeting = os.environ.get("MASTER_ADDR", "localhost")
    return meeting if rank == 0 or meeting in ("localhost", "127.0.0.1", "::1") else socket.gethostname()


# ---- exchanges ------------------------------------------------------------------------------------------------------

DEFAULT_TIMEOUT = 60.0
TIMEOUT_VARIABLE = "SUPEROFFLOAD_RANK_TIMEOUT"
FRAME = 128  # bytes of the message that every exchange begins with
GLOO_HINT = (
    "gloo uses the network that this host's name resolves to; GLOO_SOCKET_IFNAME, set to the name of a device on every "
    "rank, chooses another"
)
_HEAD = struct.Struct("<IQ")  # a checksum of the exchange's name, and how many bytes follow
ROOM = FRAME - _HEAD.size  # bytes for the payload of a small exchange, which is that message alone
_ROLL_CALL = 0.2  # share of the time-out that is kept for finding the missing ranks


def rank_timeout(value: float | None) -> float:
    """Returns the argument, else the environment's value, else a minute; in seconds."""
    if value is not None:
        return check_number("rank_timeout", value, low=0.1)
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        raise ArgumentError(f"{TIMEOUT_VARIABLE}={text!r}: expected a number of seconds; unset: 60") from None
    return check_number(TIMEOUT_VARIABLE, seconds, low=0.1)


class Gather:
    """Gathers equally long tensors of all ranks, in the order of ranks."""

    def __init__(self, group: RankGroup, what: str, mine: Tensor) -> None:
        self._group, self._what = group, what
        self._parts = [torch.empty_like(mine) for _ in group.ranks]
        with group.naming_the_lost(what):
            self._work = group.gloo.allgather([self._parts], [mine])

    def wait(self) -> list[Tensor]:
        with self._group.naming_the_lost(self._what):
            self._work.wait(timedelta(seconds=self._group.patience))
        return self._parts


class Exchange:
    """Exchanges the first message of every rank. ``follows``: bytes that this rank will send next."""

    def __init__(self, group: RankGroup, what: str, payload: bytes, follows: int = 0) -> None:
        self._group, self._what = group, what
        frame = _HEAD.pack(zlib.crc32(what.encode()), follows) + payload
        assert len(frame) <= FRAME
        self._gather = group.gather(what, torch.frombuffer(bytearray(frame.ljust(FRAME, b"\0")), dtype=torch.uint8))
        self.follows: list[int] = []

    def wait(self) -> list[bytes]:
        """Returns all ranks' payloads, padded with zeros. Raises RankError on all ranks if their exchanges differ."""
        frames = [part.numpy().tobytes() for part in self._gather.wait()]
        heads = [_HEAD.unpack_from(frame) for frame in frames]
        if len({kind for kind, _ in heads}) > 1:
            self._group.say_what_each_is_doing(self._what)
        self.follows = [follows for _, follows in heads]
        return [frame[_HEAD.size :] for frame in frames]


class RankGroup:
    """Lets ranks (global numbers, ascending) exchange messages. All of them must make it, in the same order."""

    def __init__(self, ranks: Sequence[int], timeout: float, number: int) -> None:
        self.ranks = list(ranks)
        self._world = weakref.ref(_this_world())
        self.rank = dist.get_rank()
        self.timeout = timeout
        self.patience = timeout * (1.0 - _ROLL_CALL)
        self.failure: str | None = None
        self._calls = self._sessions = 0
        self.gloo = self._make_gloo(f"superoffload/{'-'.join(map(str, ranks))}/{number}")
        self.hosts = Hosts({})
        self._roll_call = RollCall(self.ranks, self.rank, timeout * _ROLL_CALL)
        told = self.exchange_objects("the roll call", (self._roll_call.address, socket.gethostname()))
        self.hosts = Hosts({rank: host for rank, (_, host) in zip(self.ranks, told, strict=True)})
        self._roll_call.join(told[0][0], timeout)

    def number_of_session(self) -> int:
        """Counts the sessions that use the group: 1 for the first."""
        self._sessions += 1
        return self._sessions

    def _make_gloo(self, name: str) -> Any:
        """Not by ``new_group()``: torch names groups by how many a rank has made, so the program's next group of all
        would hang if some ranks alone had made one of ours."""
        from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store

        def make() -> Any:
            limit, me = timedelta(seconds=self.timeout), self.ranks.index(self.rank)
            return ProcessGroupGloo(PrefixStore(name, _get_default_store()), me, len(self.ranks), limit)

        try:
            return within(self.timeout + GRACE, make)
        except (RuntimeError, TimeoutError) as error:
            raise RankError(
                f"the group of ranks {', '.join(map(str, self.ranks))} was not made within {self.timeout:g} s (seen "
                f"from rank {self.rank}): a rank did not make its optimizer, or a rank or the store of "
                f"torch.distributed (MASTER_ADDR={os.environ.get('MASTER_ADDR', '')!r}) could not be reached. "
                f"{GLOO_HINT}. Start all ranks again. [{str(error).splitlines()[0]}]"
            ) from error

    def gather(self, what: str, mine: Tensor) -> Gather:
        if self.failure is not None:
            raise RankError(f"{self.failure} (an earlier exchange failed so; the ranks cannot go on together)")
        if not dist.is_initialized() or self._world() is not dist.group.WORLD:
            raise RankError(
                f"{what}: destroy_process_group() has ended torch.distributed since the optimizer was made, and with "
                "it the group of its ranks; make a new optimizer and load the state"
            )
        self._calls += 1
        return Gather(self, what, mine)

    def exchange(self, what: str, payload: bytes) -> Exchange:
        """Starts an exchange of at most ROOM bytes; ``what`` must be the same on all ranks, and appears in errors."""
        return Exchange(self, what, payload)

    def exchange_bytes(self, what: str, payload: bytes) -> list[bytes]:
        """Exchanges payloads of any length, which may differ between ranks."""
        frame = Exchange(self, what, b"", len(payload))
        frame.wait()
        room = bytearray(payload.ljust(max(1, *frame.follows), b"\0"))
        parts = self.gather(what, torch.frombuffer(room, dtype=torch.uint8)).wait()
        return [part.numpy().tobytes()[:length] for part, length in zip(parts, frame.follows, strict=True)]

    def exchange_tensors(self, what: str, mine: Tensor) -> list[Tensor]:
        """Exchanges flat tensors of the same dtype and length."""
        frame = Exchange(self, what, b"", mine.numel() * mine.element_size())
        frame.wait()
        if len(set(frame.follows)) > 1:
            told = zip(self.ranks, frame.follows, strict=True)
            lengths = ", ".join(f"{self.hosts.rank(rank)}: {length} bytes" for rank, length in told)
            self._fail(f"{what}: not equally long on all ranks ({lengths}); all must have the same gradients")
        return self.gather(what, mine).wait()

    def exchange_objects(self, what: str, value: Any) -> list[Any]:
        """Exchanges picklable values of any kind; too slow for every step."""
        return [pickle.loads(data) for data in self.exchange_bytes(what, pickle.dumps(value))]

    def say_what_each_is_doing(self, what: str) -> None:
        """Raises on every rank an error that names each rank's exchange; all ranks must call it."""
        text = bytearray(what.encode()[:FRAME].ljust(FRAME, b"\0"))
        told = self.gather(what, torch.frombuffer(text, dtype=torch.uint8)).wait()
        names = [part.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for part in told]
        doing = "; ".join(f"{self.hosts.rank(rank)}: {name}" for rank, name in zip(self.ranks, names, strict=True))
        self._fail(
            f"the ranks do different things: {doing}. Every rank must make the same calls in the same order: step(), "
            "add_param_group(), load_state_dict(), with spread state also state_dict(), for the same parameters"
        )

    def _fail(self, message: str) -> None:
        self.failure = message
        raise RankError(message)

    @contextlib.contextmanager
    def naming_the_lost(self, what: str) -> Iterator[None]:
        """Turns gloo's errors into a RankError that names the missing ranks."""
        try:
            yield
        except RuntimeError as error:
            missing, unreachable = self._roll_call.who_is_missing(self._calls, self.hosts)
            who = f"{self.hosts.ranks(missing)} did not take part" if missing else "the connection broke"
            self.failure = (
                f"{what}: {who} within {self.timeout:g} s (seen from {self.hosts.rank(self.rank)}{unreachable}). The "
                f"ranks that still run must be restarted from the last checkpoint. [{str(error).splitlines()[0]}]"
            )
            raise RankError(self.failure) from error


def _this_world() -> Any:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return world


# Keyed by the world group: it lives from init_process_group() to destroy_process_group(), and our groups with it.
_GROUPS: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], RankGroup]] = weakref.WeakKeyDictionary()
_MADE: weakref.WeakKeyDictionary[Any, Counter[Any]] = weakref.WeakKeyDictionary()  # how many of the same ranks


def rank_group(process_group: Any, timeout: float) -> RankGroup | None:
    """Returns our group over the ranks of ``process_group`` (None: all), made once. None if there is one rank."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        ranks = sorted(dist.get_process_group_ranks(process_group or _this_world()))
    except KeyError:
        raise ArgumentError(
            f"process_group={process_group!r}: not a group of the present torch.distributed; expected one that was "
            "made after the last destroy_process_group()"
        ) from None
    if len(ranks) == 1:
        return None
    if dist.get_rank() not in ranks:
        raise ArgumentError(f"process_group={process_group!r}: rank {dist.get_rank()} is not in it; pass its own group")
    groups, key = _GROUPS.setdefault(_this_world(), {}), (tuple(ranks), timeout)
    kept = groups.get(key)
    if kept is None or kept.failure is not None:
        made = _MADE.setdefault(_this_world(), Counter())
        made[key[0]] += 1
        kept = groups[key] = RankGroup(ranks, timeout, made[key[0]])
    return kept


# ---- what a rank tells in every step --------------------------------------------------------------------------------
# Sums for the verdict and values for the light check fit the first message of an exchange (128 bytes), which also says
# which step it is about.

MOST_CLASSES = 8

_FORMAT = struct.Struct(f"<HHIIIIIIId{MOST_CLASSES}d")
assert _FORMAT.size <= ROOM

FAILED = 1  # this rank raises instead of stepping
FOUND_INF = 2  # this rank's loss scaler saw a NaN or an infinity
LEFT = 4  # this rank has no more inputs, in DistributedDataParallel.join()

NO_INPUTS = (
    "DistributedDataParallel.join(): {who} has no more inputs and takes no step, and every step needs all ranks. "
    "Make the optimizer with replicated='local', so that each rank steps by itself with DDP's gradients; then join() "
    "works as with torch.optim"
)


@dataclass(frozen=True)
class Packet:
    """Carries one rank's part of a step. ``sums``: one sum of squares per set of replicas, at most MOST_CLASSES.

    Of this step: ``settings`` and ``gradients`` are checksums of the hyper-parameters and of the parameters that have
    gradients. Of the step before: ``applied`` and ``skipped`` count steps, ``factor`` is the gradient factor, ``unit``
    the probed unit, ``bad`` 1 + the index of a shard whose published copy is not round(master), ``copy`` the checksum
    of the published copy.
    """

    sums: tuple[float, ...]
    flags: int = 0
    settings: int = 0
    gradients: int = 0
    applied: int = 0
    skipped: int = 0
    unit: int = 0
    bad: int = 0
    copy: int = 0
    factor: float = 0.0

    def to_bytes(self) -> bytes:
        sums = self.sums + (0.0,) * (MOST_CLASSES - len(self.sums))
        return _FORMAT.pack(
            self.flags, len(self.sums), self.settings, self.gradients, self.applied, self.skipped,
            self.unit, self.bad, self.copy, self.factor, *sums,
        )  # fmt: skip

    @staticmethod
    def from_bytes(data: bytes) -> Packet:
        flags, count, settings, gradients, applied, skipped, unit, bad, copy, factor, *sums = _FORMAT.unpack_from(data)
        return Packet(tuple(sums[:count]), flags, settings, gradients, applied, skipped, unit, bad, copy, factor)
