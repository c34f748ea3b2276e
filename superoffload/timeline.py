"""Records training steps as a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing.

Its lanes are compute (forward, backward, step), pack and down, processors, up and deliver, verdict. Work on a bucket
carries the bucket's number and fate in its name, and a colour by fate. The recorder stands between the engine and its
link and worker threads; without a trace it wraps neither of them and costs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from superoffload import _native
from superoffload.engine.bucket import Bucket, BucketState
from superoffload.engine.options import Recorder
from superoffload.engine.verdict import Verdict
from superoffload.errors import ArgumentError, warn

if TYPE_CHECKING:
    from torch import Tensor

    from superoffload.engine.options import Pool
    from superoffload.links.base import Link, PackTicket

COMPUTE, DOWN, PROCESSORS, UP, VERDICT = "compute", "pack and down", "processors", "up and deliver", "verdict"
_LANE_NUMBERS = {COMPUTE: 1, DOWN: 2, PROCESSORS: 10, UP: 30, VERDICT: 40}

# Names of Chrome's own colours; Perfetto colours by the text of the name, which contains the fate.
_COLOURS = {
    "committed": "good",
    "stepped": "thread_state_runnable",
    "stepped two-phase": "rail_animation",
    "replayed": "bad",
    "undone": "yellow",
    "skipped": "terrible",
    "abandoned": "grey",
}


@dataclass
class _Work:
    """Records one piece of work on a bucket; the completion may supply its times later."""

    lane: str
    verb: str
    bucket: Bucket | None
    began: float = 0.0
    ended: float = 0.0
    completion: _native.Completion | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    step: int = 0  # the step it began in, set when that ends, with the bucket's number and fate
    number: int | None = None
    fate: str | None = None

    def take_times(self) -> bool:
        """Takes the times over from the workers; returns whether the work ran."""
        if self.completion is not None:
            self.began, self.ended = self.completion.began, self.completion.ended
        return self.ended >= self.began > 0


class Timeline(Recorder):
    """Records an engine's steps into one file, which is complete after every step and strict JSON after `close`."""

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        self.path = Path(path)
        self._rank = rank
        self._pid = os.getpid()
        try:
            self._file: IO[str] | None = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(
                f"trace={path}: the file cannot be written ({error.strerror}); name a file in an existing folder"
            ) from error
        self._separator = "[\n"
        self._zero = _native.now_seconds()
        self._pending: list[_Work] = []
        self._step = 0
        self._deciding: float | None = None
        self._backward: float | None = None  # when it began, as far as known
        self._verdict: Verdict | None = None
        self._buckets: Callable[[], Sequence[Bucket]] = tuple  # of the followed engine
        self._by_work: dict[int, Bucket] = {}
        self._free: list[float] = []  # per row of the processors' lane: until when it is taken
        self._announce()

    # ---- what an engine tells ---------------------------------------------------------------------------------

    def follow(self, buckets: Callable[[], Sequence[Bucket]]) -> None:
        self._buckets = buckets
        self._by_work = {}

    def wrap_link(self, link: Link) -> Link:
        return cast("Link", _RecordingLink(link, self))  # all other attributes are the link's

    def wrap_pool(self, pool: Pool) -> Pool:
        return cast("Pool", _RecordingPool(pool, self))  # all other attributes are the pool's

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records part of the training loop, such as "forward", in the compute lane."""
        began = _native.now_seconds()
        with _nvtx(name):
            yield
        ended = _native.now_seconds()
        self._pending.append(_Work(COMPUTE, name, None, began, ended))
        self._backward = ended

    def packed(self, bucket: Bucket, began: float, arrival: _native.Completion | None) -> None:
        """Records packing. ``arrival``: the completion of a gradient that is still on its way, with its own times."""
        if self._backward is None:
            self._backward = began
        self._pending.append(_Work(DOWN, "pack", bucket, began, _native.now_seconds(), arrival))

    def submitted(self, work: _native.BucketWork, verb: str, completion: _native.Completion) -> None:
        bucket = self._bucket_of(work)
        waited = bucket.why_not_speculated if bucket is not None and verb in ("step", "publish") else None
        arguments = {} if waited is None else {"waited": waited}
        self._pending.append(_Work(PROCESSORS, verb, bucket, completion=completion, arguments=arguments))

    def delivered(self, bucket: Bucket, began: float, completion: _native.Completion | None) -> None:
        """Records a delivery. ``completion``: that of a copy that still runs, with its own times."""
        work = _Work(UP, "deliver", bucket, began, _native.now_seconds(), completion)
        if self._verdict is None:  # on demand, after its step has ended
            work.step, work.number, work.fate = self._step, self._buckets().index(bucket), _fate(bucket)
        self._pending.append(work)

    def landed(self, buckets: Sequence[Bucket], began: float) -> None:
        """Records how long the training thread waited for buckets left for later."""
        verb = f"wait for {len(buckets)} buckets" if len(buckets) != 1 else "wait for a bucket"
        self._pending.append(_Work(UP, verb, None, began, _native.now_seconds(), step=self._step))

    def deciding(self) -> None:
        self._deciding = _native.now_seconds()

    def decided(self, verdict: Verdict) -> None:
        self._verdict = verdict
        arguments = {"grad_norm": str(verdict.grad_norm), "clip_coefficient": verdict.clip_coefficient}
        began = self._deciding or _native.now_seconds()
        name = "found inf: skip" if verdict.found_inf else "clip" if verdict.clip_coefficient < 1 else "no clip"
        self._pending.append(_Work(VERDICT, name, None, began, _native.now_seconds(), arguments=arguments))

    def end_step(self, buckets: Sequence[Bucket]) -> None:
        """Sets the fate of every bucket's work and writes the work that has ended."""
        now = _native.now_seconds()
        self._step += 1
        if self._backward is not None:
            until = self._deciding or now
            self._pending.append(_Work(COMPUTE, "backward", None, self._backward, max(until, self._backward)))
        if self._deciding is not None:
            self._pending.append(_Work(COMPUTE, "step()", None, self._deciding, now))
        fates = {id(bucket): _fate(bucket) for bucket in buckets}
        numbers = {id(bucket): number for number, bucket in enumerate(buckets)}
        for work in self._pending:
            if work.step == 0:
                key = id(work.bucket)
                work.step, work.number, work.fate = self._step, numbers.get(key), fates.get(key)
        self._write_what_is_over()
        self._deciding = self._backward = self._verdict = None

    def _write_what_is_over(self) -> None:
        """Writes ended work. Settles and uploads may run beside the next forward; the next step's end writes those."""
        over: list[_Work] = []
        left: list[_Work] = []
        for work in self._pending:  # each is asked once, since it may end at any moment
            runs = work.completion is not None and not work.completion.done()
            (over if work.step and not runs else left).append(work)
        self._pending = left
        with self._giving_up():
            for work in sorted((work for work in over if work.take_times()), key=lambda work: work.began):
                self._write(self._event(work))
            if self._file is not None:
                self._file.flush()

    def close(self) -> None:
        """Writes the rest and makes the file strict JSON. Idempotent."""
        self._write_what_is_over()
        if self._file is not None and os.getpid() == self._pid:  # a forked child leaves the parent's file alone
            with self._giving_up():
                self._file.write("\n]\n" if self._separator != "[\n" else "[]\n")
                self._file.close()
            self._file = None

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Turns a write error, such as a full disk, into a warning and the end of the timeline; training goes on."""
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            warn(
                f"trace={self.path}: it cannot be written any more ({error.strerror}), so nothing more is recorded; "
                "training goes on. Name a file where there is room"
            )
            if file is not None:
                with suppress(OSError):  # the buffer may hold more to write
                    file.close()

    # ---- the file ---------------------------------------------------------------------------------------------

    def _bucket_of(self, work: _native.BucketWork) -> Bucket | None:
        if id(work) not in self._by_work:
            self._by_work = {id(bucket.work): bucket for bucket in self._buckets()}
        return self._by_work.get(id(work))

    def _event(self, work: _Work) -> dict[str, Any]:
        lane = _LANE_NUMBERS[work.lane]
        if work.lane == PROCESSORS:
            lane += self._row(work)
        event: dict[str, Any] = {
            "ph": "X",
            "name": work.verb,
            "cat": work.lane,
            "pid": self._rank,
            "tid": lane,
            "ts": round(1e6 * (work.began - self._zero), 3),
            "dur": round(1e6 * (work.ended - work.began), 3),
            "args": {"step": work.step, **work.arguments},
        }
        if work.bucket is not None and work.number is not None:
            event["args"].update(bucket=work.number, numel=work.bucket.numel, fate=work.fate)
            event["name"] = f"bucket {work.number} {work.verb}: {work.fate}"
            event["cname"] = _COLOURS.get(work.fate or "", "generic_work")
        elif work.lane == VERDICT:
            event["cname"] = {"clip": "bad", "no clip": "good"}.get(work.verb, "terrible")
        return event

    def _row(self, work: _Work) -> int:
        """Returns a free row: a worker thread may begin a bucket before the previous one has ended."""
        for row, until in enumerate(self._free):
            if until <= work.began:
                self._free[row] = work.ended
                return row
        self._free.append(work.ended)
        row = len(self._free) - 1
        if row > 0:
            self._name_lane(_LANE_NUMBERS[PROCESSORS] + row, f"{PROCESSORS} ({row + 1})")
        return row

    def _announce(self) -> None:
        self._write({"ph": "M", "name": "process_name", "pid": self._rank, "args": {"name": f"rank {self._rank}"}})
        for lane, number in _LANE_NUMBERS.items():
            self._name_lane(number, lane)

    def _name_lane(self, number: int, name: str) -> None:
        for what, arguments in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number})):
            self._write({"ph": "M", "name": what, "pid": self._rank, "tid": number, "args": arguments})

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(self._separator + json.dumps(event))
            self._separator = ",\n"


def _fate(bucket: Bucket) -> str:
    """Returns a bucket's fate; one still filling at the step's end was not part of it, or lost its gradient."""
    if bucket.state is BucketState.FILLING:
        return "undone"
    return "stepped two-phase" if bucket.state is BucketState.PUBLISHED else bucket.state.value


def record(path: str | os.PathLike[str]) -> Timeline:
    """Returns a timeline in `path`; ranks other than 0 write beside it: trace.json, trace.rank1.json, ..."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"trace={path!r}: expected the path of a file to write, or None")
    own = Path(path)
    if rank > 0:
        own = own.with_name(f"{own.stem}.rank{rank}{own.suffix}")
    return Timeline(own, rank)


@dataclass(eq=False, repr=False)
class _RecordingLink:
    """Forwards to the engine's link and records packing and delivering."""

    _link: Any
    _timeline: Timeline

    def pack(self, bucket: Bucket, grads: Sequence[Tensor | None]) -> PackTicket:
        began = _native.now_seconds()
        with _nvtx("superoffload pack"):
            ticket: PackTicket = self._link.pack(bucket, grads)
        self._timeline.packed(bucket, began, ticket.completion if self._link.asynchronous else None)
        return ticket

    def deliver(self, bucket: Bucket, after: _native.Completion) -> _native.Completion:
        began = _native.now_seconds()
        with _nvtx("superoffload deliver"):
            completion: _native.Completion = self._link.deliver(bucket, after)
        self._timeline.delivered(bucket, began, completion if self._link.asynchronous else None)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


@dataclass(eq=False, repr=False)
class _RecordingPool:
    """Forwards to the engine's worker threads and records the completions of their work."""

    _pool: Pool
    _timeline: Timeline

    def submit(
        self, work: _native.BucketWork, operation: _native.Operation, *rest: Any, **named: Any
    ) -> _native.Completion:
        completion = self._pool.submit(work, operation, *rest, **named)
        verb = operation.name
        self._timeline.submitted(work, {"step_journaled": "speculate"}.get(verb, verb), completion)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


@contextmanager
def _nvtx(name: str) -> Iterator[None]:
    """Opens a range of the same name for NVIDIA's profilers, if there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


@contextmanager
def span(timeline: Timeline | None, name: str) -> Iterator[None]:
    """Opens `timeline.span(name)`, or nothing without a timeline."""
    if timeline is None:
        yield
    else:
        with timeline.span(name):
            yield
