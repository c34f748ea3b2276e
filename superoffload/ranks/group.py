"""The ranks that share a verdict: a gloo group of our own, exchanges with a time-out, and who is missing after one.

Every exchange begins with one message of the same length, which says what it is about. So ranks that are in different
exchanges (one saves a checkpoint, the other steps) get an error that says so; gloo itself would mix up their data.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from superoffload.errors import ArgumentError, RankError
from superoffload.host.numbers import check_number
from superoffload.ranks.roll_call import GRACE, RollCall, within

DEFAULT_TIMEOUT = 60.0
TIMEOUT_VARIABLE = "SUPEROFFLOAD_RANK_TIMEOUT"
FRAME = 128  # bytes of the message that every exchange begins with
_HEAD = struct.Struct("<IQ")  # a checksum of what the exchange is about, and how many bytes follow
ROOM = FRAME - _HEAD.size  # is left for the payload of a small exchange, which is that message alone
_ROLL_CALL = 0.2  # share of the time-out that is kept for finding out who is missing


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
        self.gloo = self._make_gloo()
        self._calls = 0
        self._roll_call = RollCall(self.ranks, self.rank, timeout * _ROLL_CALL)
        self._roll_call.join(self.exchange_objects("the roll call", self._roll_call.address)[0], timeout)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _make_gloo(self) -> Any:
        whole_world = len(self.ranks) == dist.get_world_size()

        def make() -> Any:
            limit = timedelta(seconds=self.timeout)
            return dist.new_group(self.ranks, timeout=limit, backend="gloo", use_local_synchronization=not whole_world)

        try:
            return within(self.timeout + GRACE, make)
        except (RuntimeError, TimeoutError) as error:
            raise RankError(
                f"the group of ranks {', '.join(map(str, self.ranks))} was not made within {self.timeout:g} s (seen "
                f"from rank {self.rank}): a rank did not come to its constructor, or could not be reached, or the "
                f"store of torch.distributed could not (MASTER_ADDR={os.environ.get('MASTER_ADDR', '')!r}). Start all "
                f"ranks again. [{str(error).splitlines()[0]}]"
            ) from error

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
            missing, unreachable = self._roll_call.who_is_missing(self._calls)
            who = f"rank {', '.join(map(str, missing))} did not take part" if missing else "the connection broke"
            self.failure = (
                f"{what}: {who} within {self.timeout:g} s (seen from rank {self.rank}{unreachable}). The ranks that "
                f"still run must be restarted from the last checkpoint. [{str(error).splitlines()[0]}]"
            )
            raise RankError(self.failure) from error


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
