"""Plans and writes one rank's part of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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
from superoffload.errors import ArgumentError, StateError
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
