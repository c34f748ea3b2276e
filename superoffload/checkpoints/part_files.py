"""Plans and writes one rank's part of a checkpoint, and joins the parts of all ranks.

The ranks tell each other by files in the checkpoint's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superoffload.adamw import AdamW
from superoffload.checkpoints import folder as folders
from superoffload.checkpoints.contents import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MODEL,
    Named,
    holding_of,
    piece_of,
    stepped,
)
from superoffload.checkpoints.folder import STATE
from superoffload.checkpoints.tensor_files import Entry, Piece, TensorFile, flat_runs
from superoffload.distributed.ownership import Holding
from superoffload.engine import moments
from superoffload.engine.master_halves import join
from superoffload.engine.moments import read_moment, shown_dtype
from superoffload.engine.snapshot import ShardState, Snapshot
from superoffload.errors import ArgumentError, DiskError, RankError, StateError
from superoffload.host.tensors import local_of


@dataclass
class Part:
    """Holds what this rank writes: entries, their place in the whole, and the sources of their bytes."""

    entries: list[Entry] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    plain: list[tuple[str, Tensor, int | None]] = field(
        default_factory=list
    )  # with its version, which shows writes; None: a copy
    shards: dict[int, tuple[str, Tensor, Holding]] = field(default_factory=dict)  # by index: name, published
    state: bytes = b""  # all but the large tensors; the first rank writes it

    @property
    def nbytes(self) -> int:
        return len(self.state) + sum(entry.nbytes for entry in self.entries)

    def keep_state(self, state: bytes) -> None:
        self.state = state

    def add(self, name: str, dtype: torch.dtype, piece: Piece) -> None:
        self.entries.append(Entry(name, dtype, piece.box.lengths))
        self.pieces[name] = piece


@dataclass(frozen=True)
class Written:
    """Holds what a rank has written: the first bytes of its file, and its report for the manifest."""

    header: bytes
    report: dict[str, Any]


def plan_part(optimizer: Optimizer, named: Named, *, copy: bool) -> Part:
    """Plans this rank's part. ``copy``: copies buffers, which may change before they are written."""
    part = Part()
    own = {}
    if isinstance(optimizer, AdamW):
        for name, param, tracked in stepped(optimizer, named):
            own[name] = tracked
            shard = tracked.shard
            if named.writes(shard.index):
                piece = piece_of(param, tracked.holding)
                part.shards[shard.index] = (name, param, tracked.holding)
                part.add(MODEL + name, param.dtype, piece)
                part.add(MASTER + name, torch.float32, piece)
                part.add(EXP_AVG + name, shown_dtype(shard.exp_avg.dtype), piece)
                part.add(EXP_AVG_SQ + name, shown_dtype(shard.exp_avg_sq.dtype), piece)
    trains = {id(param) for param in named.params.values()}
    holdings = {name: holding_of(name, tensor) for name, tensor in named.tensors.items() if name not in own}
    written = named.writes_all_of(holdings)
    for name, holding in holdings.items():
        if name not in written:
            continue
        tensor = named.tensors[name]
        local = local_of(tensor)
        part.add(MODEL + name, tensor.dtype, piece_of(tensor, holding))
        buffer = copy and not isinstance(tensor, nn.Parameter) and id(tensor) not in trains
        part.plain.append((MODEL + name, local.clone() if buffer else local, None if buffer else local._version))
    if not isinstance(optimizer, AdamW):
        _plan_of_torch(part, optimizer, named)
    return part


def _plan_of_torch(part: Part, optimizer: Optimizer, named: Named) -> None:
    for name, param in named.params.items():
        state = optimizer.state.get(param, {})
        lost = sorted(map(str, state.keys() - {"step", "exp_avg", "exp_avg_sq"}))
        if lost:
            raise ArgumentError(
                f"optimizer: its state of {name} has {', '.join(lost)}, for which a checkpoint has no place; use "
                "optimizer.state_dict() and torch.save()"
            )
        for prefix, key in ((EXP_AVG, "exp_avg"), (EXP_AVG_SQ, "exp_avg_sq")):
            if key in state:
                part.add(prefix + name, state[key].dtype, piece_of(param, holding_of(name, param)))
                part.plain.append((prefix + name, local_of(state[key]), None))


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_part(part: Part, named: Named, writing: Path, snapshot: Snapshot | None) -> Written:
    """Writes this rank's tensors; the first rank also writes ``state.pt``."""
    name = file_name(named.rank)
    file: TensorFile | None = None
    files: dict[str, Any] = {}

    def read(index: int, values: ShardState) -> None:
        assert file is not None
        shard, param, holding = part.shards[index]
        stored = holding.in_own_order(values.master, param.shape)
        upper = values.halves
        if upper and holding.order is not None:  # a file has another order than its memory, also across runs
            upper = (holding.in_own_order(torch.cat(upper), param.shape),)
        file.write(MASTER + shard, _masters(stored, upper))
        exp_avg = read_moment(values.exp_avg, stored.numel(), moments.EXP_AVG)
        file.write(EXP_AVG + shard, flat_runs(holding.in_own_order(exp_avg, param.shape)))
        exp_avg_sq = read_moment(values.exp_avg_sq, stored.numel(), moments.EXP_AVG_SQ)
        file.write(EXP_AVG_SQ + shard, flat_runs(holding.in_own_order(exp_avg_sq, param.shape)))
        file.write(MODEL + shard, (run.to(param.dtype) for half in upper or (stored,) for run in flat_runs(half)))

    # With several ranks each save has its own mark, by which a rank recognizes its file.
    mark = {"save": writing.name.rpartition("-")[2]} if len(named.ranks) > 1 else {}
    try:
        file = TensorFile(writing / name, part.entries, {"format": "pt", **mark})
        if snapshot is not None:
            snapshot.read_all(read)
        _write_plain(part, file)
        file.finish()
    finally:
        if snapshot is not None:  # also if the file could not be made: steps must not wait for it
            snapshot.end()
        if file is not None:
            file.close()
    files[name] = {"bytes": file.nbytes, "header": _sha256(file.header)}
    if named.is_first:
        folders.write_durably(writing / STATE, part.state)
        files[STATE] = {"bytes": len(part.state), "sha256": _sha256(part.state)}
    tensors = {key: {**part.pieces[key].as_json(), "file": name, "sha256": file.digests[key]} for key in part.pieces}
    return Written(file.header, {"files": files, "tensors": tensors})


def _masters(stored: Tensor, upper: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields masters in fp32; with ``upper``, ``stored`` has the remainders of split ones."""
    if not upper:
        yield from flat_runs(stored)
    at = 0
    for half in upper:
        yield from map(join, flat_runs(half), flat_runs(stored[at : at + half.numel()]))
        at += half.numel()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_plain(part: Part, file: TensorFile) -> None:
    for name, tensor, _ in part.plain:
        file.write(name, flat_runs(tensor))
    for name, tensor, version in part.plain:
        if version is not None and tensor._version != version:
            raise StateError(f"{name.removeprefix(MODEL)}: written to while it was saved; save it again, with save()")


_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two looks; hundreds of ranks may watch one folder


# ---- joining the parts ----------------------------------------------------------------------------------------------


def hand_in(written: Written, named: Named, writing: Path) -> None:
    """Tells the first rank that this rank's part is on the disk."""
    name = file_name(named.rank)
    folders.write_durably(writing / f".{name}.part", json.dumps(written.report).encode())
    os.rename(writing / f".{name}.part", writing / f".{name}.json")


def tell_failure(writing: Path, rank: int) -> None:
    """Tells the first rank not to wait for this rank's part, by an empty file, which often fits on a full disk."""
    with suppress(OSError):
        (writing / f".{file_name(rank)}.failed").touch()


def complete(named: Named, writing: Path, final: Path, timeout: float) -> None:
    """Waits on the first rank until all others have written their part, then gives the folder its name."""
    files: dict[str, Any] = {}
    tensors: dict[str, list[Any]] = {}
    deadline = time.monotonic() + timeout
    pauses = _pauses()
    for rank in named.ranks:
        path = writing / f".{file_name(rank)}.json"
        while not path.exists():
            if path.with_suffix(".failed").exists():
                raise RankError(
                    f"save(): {named.called(rank)} could not write its part of {final}; its output says why"
                )
            if time.monotonic() > deadline:
                raise RankError(
                    f"save(): {named.called(rank)} has not written its part of {final} within {timeout:g} s"
                )
            with suppress(OSError):
                os.utime(writing)  # tells the ranks that wait for the name that this one is alive
            next(pauses)
        report = json.loads(path.read_bytes())
        path.unlink()
        files.update(report["files"])
        for name, piece in report["tensors"].items():
            tensors.setdefault(name, []).append(piece)
    folders.finish(writing, final, {"ranks": len(named.ranks), "files": files, "tensors": tensors})


def wait_until_named(written: Written, named: Named, writing: Path, final: Path, timeout: float) -> None:
    """Waits on the other ranks until the folder with their part has its name and is on the disk.

    They wait as long as the first rank gives signs of life. Their part is already handed in, so an error here does not
    mean that the checkpoint fails; the first rank decides that.
    """
    leads, name = writing / file_name(named.ranks[0]), file_name(named.rank)
    signs: list[int] | None = None
    deadline, absent, pauses = 0.0, 0, _pauses()
    while True:
        there = _there(writing, final)
        if writing.name in there:
            absent = 0
        elif final.name in there and _begins_with(final, name, written.header):
            break
        else:
            absent += 1  # a rename may be under way: look twice
        if absent > 1:
            raise gave_up(final, "another save has taken this name") if final.name in there else gave_up(final)
        seen = _times_of(writing, leads)
        if seen != signs:
            signs, deadline = seen, time.monotonic() + timeout
        if time.monotonic() > deadline:
            raise RankError(
                f"save(): {final}: no sign of life of the first rank within {timeout:g} s; see its output. If it goes "
                "on, the checkpoint may still be finished"
            )
        next(pauses)
    folders.confirm(final)


def gave_up(final: Path, why: str = "the first rank gave up") -> RankError:
    return RankError(f"save(): {final}: {why}; see the first rank's output")


def _pauses() -> Iterator[None]:
    seconds = _FIRST_PAUSE
    while True:
        time.sleep(seconds)
        seconds = min(seconds * 1.1, _LONGEST_PAUSE)
        yield


def _there(writing: Path, final: Path) -> set[str]:
    """Returns which of the two names exist, from a listing: NFS may remember for a while that a name was absent."""
    try:
        return {writing.name, final.name} & set(os.listdir(final.parent))
    except PermissionError:  # the folder can be written but not read
        return {path.name for path in (writing, final) if path.exists()}
    except OSError:
        return {writing.name}  # unknown: go on until the deadline


def _begins_with(final: Path, name: str, header: bytes) -> bool:
    """Returns whether the file is this save's; the manifest would tell too, but may have hundreds of MB."""
    try:
        with open(final / name, "rb") as file:
            return file.read(len(header)) == header
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DiskError(
            error.errno, f"{final}: written, but {name} could not be read ({error.strerror}); check the disk"
        ) from error


def _times_of(*paths: Path) -> list[int]:
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(os.stat(path).st_mtime_ns)
    return times
