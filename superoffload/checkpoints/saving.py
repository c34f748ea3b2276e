"""Saving: every rank writes what it holds, the first one gives the folder its name when all are done."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Mapping
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
    Piece,
    check_extra,
    check_optimizer,
    group_values,
    holding_of,
    name_everything,
    on_all_ranks,
    piece_of,
    stepped,
)
from superoffload.checkpoints.safetensors import Entry, TensorFile, flat_runs
from superoffload.checkpoints.snapshot import ShardState, Snapshot
from superoffload.errors import ArgumentError, RankError, StateError
from superoffload.ranks.layout import is_dtensor, local_of

LOGGER = logging.getLogger("superoffload")
STATE = "state.pt"
_POLL_SECONDS = 0.02
Write = Callable[[TensorFile], None]


@dataclass
class _Plan:
    """What this rank writes: entries with their place in the whole, and who produces their bytes."""

    entries: list[Entry] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    plain: list[tuple[str, Tensor, int | None]] = field(default_factory=list)  # with version, if not copied
    shards: dict[int, tuple[str, torch.dtype]] = field(default_factory=dict)  # by index: name, published dtype

    def add(self, name: str, dtype: torch.dtype, piece: Piece) -> None:
        self.entries.append(Entry(name, dtype, piece.own_shape))
        self.pieces[name] = piece


class Saving:
    """A checkpoint on its way. ``wait()`` before the process ends, or to learn of errors."""

    def __init__(self, final: Path, snapshot: Snapshot | None) -> None:
        self.folder = final
        self._snapshot = snapshot
        self._error: BaseException | None = None
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def largest_extra_bytes(self) -> int:
        """Copies that were made of state which changed before it was written, at any time."""
        return self._snapshot.largest_extra if self._snapshot is not None else 0

    def wait(self, timeout: float | None = None) -> Path:
        """The finished folder; raises what went wrong. The checkpoints before it are untouched in any case."""
        if not self._ended.wait(timeout):
            raise StateError(f"{self.folder}: not written after {timeout:g} s; wait longer")
        if self._error is not None:
            raise self._error
        return self.folder

    def _run(self, work: Callable[[], None], *, in_background: bool) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
                if in_background:  # also where nobody waits
                    LOGGER.error("%s was not saved: %s", self.folder, error)
            finally:
                self._ended.set()

        if in_background:
            threading.Thread(target=guarded, name="superoffload checkpoint").start()
        else:
            guarded()


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    timeout: float = 600.0,
) -> Path:
    """Writes ``model``, ``optimizer`` and ``extra`` as of the last finished step into the new ``folder``.

    The folder appears under its name when everything in it is on the disk. On several ranks all of them call this,
    with a folder that all of them see; every rank writes what it holds.

    Arguments:
        extra: values that ``torch.load(weights_only=True)`` reads: state_dicts of schedulers, counters, RNG states.
        keep: afterwards remove the oldest checkpoints beside this one until so many are left.
        timeout: seconds that ranks wait for each other's files.
    """
    saving = _begin(folder, model, optimizer, extra, keep, timeout, memory=None)
    return saving.wait()


def save_in_background(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: AdamW,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    timeout: float = 600.0,
    memory: int = 1 << 30,
) -> Saving:
    """``save`` while training goes on: what a later step is about to change is copied, or written first.

    ``memory``: bytes that copies may take; where they are used up, the step waits until its part is written.
    Buffers are copied at once. Parameters that do not train are read as they are and must not be written meanwhile.
    """
    if not isinstance(optimizer, AdamW):
        raise ArgumentError(f"optimizer: {type(optimizer).__name__}, expected superoffload.AdamW; use save()")
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
        raise ArgumentError(f"memory={memory!r}: expected a number of bytes of at least 0")
    return _begin(folder, model, optimizer, extra, keep, timeout, memory=memory)


def _begin(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    extra: Mapping[str, Any] | None,
    keep: int | None,
    timeout: float,
    memory: int | None,
) -> Saving:
    """``memory`` None: in this thread."""
    check_optimizer(optimizer)
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ArgumentError(f"keep={keep!r}: expected a whole number of at least 1, or None")
    final = Path(os.path.abspath(folder))
    if isinstance(optimizer, AdamW):
        optimizer.synchronize()
        optimizer.refresh_written()
        optimizer.end_snapshot()
    named = name_everything(model, optimizer)
    if named.session is None and any(is_dtensor(t) and t.device_mesh.size() > 1 for t in named.tensors.values()):
        raise ArgumentError("model: sharded over ranks; that needs superoffload.AdamW, or torch.distributed.checkpoint")
    plan = _plan(optimizer, named, copy=memory is not None)
    state = on_all_ranks(named.session, "save()", lambda: _state_bytes(optimizer, named, check_extra(extra)))
    writing = _agree_on_folder(named, final)
    snapshot = None
    if isinstance(optimizer, AdamW):
        shards = [tracked.shard for _, _, tracked in stepped(optimizer, named) if tracked.shard.index in plan.shards]
        snapshot = Snapshot(shards, memory or 0)
        if memory is not None:
            optimizer.begin_snapshot(snapshot)
    saving = Saving(final, snapshot)

    def work() -> None:
        try:
            _write_own(plan, named, writing, snapshot, state)
            if named.is_first:
                _complete(named, writing, final, timeout)
                if keep is not None:
                    folders.keep_only(final, keep)
            else:
                _wait_until_named(writing, final, timeout)
        except BaseException:
            if named.is_first:
                folders.give_up(writing)
            raise

    try:
        saving._run(work, in_background=memory is not None)
    except BaseException:  # no thread could be started: nobody may wait for the snapshot
        if snapshot is not None:
            snapshot.end()
        if named.is_first:
            folders.give_up(writing)
        raise
    return saving


def _plan(optimizer: Optimizer, named: Named, *, copy: bool) -> _Plan:
    """``copy``: buffers may change before they are written."""
    plan = _Plan()
    own = {}
    if isinstance(optimizer, AdamW):
        for name, param, tracked in stepped(optimizer, named):
            own[name] = tracked
            if named.writes(tracked.holding):
                piece = piece_of(param, tracked.holding)
                shard = tracked.shard
                plan.shards[shard.index] = (name, param.dtype)
                plan.add(MODEL + name, param.dtype, piece)
                plan.add(MASTER + name, torch.float32, piece)
                plan.add(EXP_AVG + name, shard.exp_avg.dtype, piece)
                plan.add(EXP_AVG_SQ + name, shard.exp_avg_sq.dtype, piece)
    trains = {id(param) for param in named.params.values()}
    for name, tensor in named.tensors.items():
        holding = holding_of(name, tensor)
        if name in own or not (named.writes(holding) if is_dtensor(tensor) else named.is_first):
            continue
        local = local_of(tensor)
        plan.add(MODEL + name, tensor.dtype, piece_of(tensor, holding))
        buffer = copy and not isinstance(tensor, nn.Parameter) and id(tensor) not in trains
        plan.plain.append((MODEL + name, local.clone() if buffer else local, None if buffer else local._version))
    if not isinstance(optimizer, AdamW):
        _plan_of_torch(plan, optimizer, named)
    return plan


def _plan_of_torch(plan: _Plan, optimizer: Optimizer, named: Named) -> None:
    for name, param in named.params.items():
        state = optimizer.state.get(param, {})
        for prefix, key in ((EXP_AVG, "exp_avg"), (EXP_AVG_SQ, "exp_avg_sq")):
            if key in state:
                plan.add(prefix + name, state[key].dtype, piece_of(param, holding_of(name, param)))
                plan.plain.append((prefix + name, local_of(state[key]), None))


def _state_bytes(optimizer: Optimizer, named: Named, extra: dict[str, Any]) -> bytes:
    """What is no tensor of the model's size; read back at once, so that nothing unreadable is saved."""
    steps = {}
    for name, param in named.params.items():
        if param in optimizer.state and "step" in optimizer.state[param]:
            steps[name] = int(optimizer.state[param]["step"])
    groups = [{**values, "params": names} for values, names in zip(group_values(optimizer), named.groups, strict=True)]
    content = {"groups": groups, "steps": steps, "other": named.other, "aliases": named.aliases, "extra": extra}
    try:
        return _safely(content)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise ArgumentError(
            f"{_unreadable(extra) or 'a value of a param group or of get_extra_state()'}: not saved, since only what "
            "torch.load(weights_only=True) reads back is: tensors, numbers, strings, lists, tuples, dicts of these"
        ) from error


def _safely(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return buffer.getvalue()


def _unreadable(extra: Mapping[str, Any]) -> str | None:
    for key, value in extra.items():
        try:
            _safely(value)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):
            return f"extra[{key!r}]: {type(value).__name__}"
    return None


def _agree_on_folder(named: Named, final: Path) -> Path:
    """The first rank makes it; all of them know its name."""
    token = uuid.uuid4().hex[:12]
    error: Exception | None = None
    if named.is_first:
        try:
            folders.begin(final, token)
        except (ArgumentError, OSError) as failed:
            error = failed
    if named.session is not None:
        token = named.session.group.exchange_objects("save()", token)[0]
        named.session.agree("save()", error)
    if error is not None:
        raise error
    return folders.writing_folder(final, token)


# ---- in the writing thread --------------------------------------------------------------------------------------


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_own(plan: _Plan, named: Named, writing: Path, snapshot: Snapshot | None, state: bytes) -> None:
    """This rank's tensors, and last of all what belongs into the manifest about them."""
    name = _file_name(named.rank)
    file: TensorFile | None = None
    files: dict[str, Any] = {}

    def read(index: int, values: ShardState) -> None:
        assert file is not None
        shard, dtype = plan.shards[index]
        file.write(MASTER + shard, flat_runs(values.master))
        file.write(EXP_AVG + shard, flat_runs(values.exp_avg))
        file.write(EXP_AVG_SQ + shard, flat_runs(values.exp_avg_sq))
        file.write(MODEL + shard, (run.to(dtype) for run in flat_runs(values.master)))

    try:
        file = TensorFile(writing / name, plan.entries, {"format": "pt"})
        if snapshot is not None:
            snapshot.read_all(read)
        _write_plain(plan, file)
        file.finish()
    finally:
        if snapshot is not None:  # also where the file could not be made: nobody may wait for it
            snapshot.end()
        if file is not None:
            file.close()
    files[name] = {"bytes": file.nbytes, "header": _sha256(file.header)}
    if named.is_first:
        folders.write_durably(writing / STATE, state)
        files[STATE] = {"bytes": len(state), "sha256": _sha256(state)}
    tensors = {key: {**plan.pieces[key].as_json(), "file": name, "sha256": file.digests[key]} for key in plan.pieces}
    report = json.dumps({"files": files, "tensors": tensors}).encode()
    folders.write_durably(writing / f".{name}.part", report)
    os.rename(writing / f".{name}.part", writing / f".{name}.json")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_plain(plan: _Plan, file: TensorFile) -> None:
    for name, tensor, _ in plan.plain:
        file.write(name, flat_runs(tensor))
    for name, tensor, version in plan.plain:
        if version is not None and tensor._version != version:
            raise StateError(f"{name.removeprefix(MODEL)}: written to while it was saved; save it again, with save()")


def _complete(named: Named, writing: Path, final: Path, timeout: float) -> None:
    """The first rank: once all others have written their part, the folder gets its name."""
    files: dict[str, Any] = {}
    tensors: dict[str, list[Any]] = {}
    deadline = time.monotonic() + timeout
    for rank in named.ranks:
        path = writing / f".{_file_name(rank)}.json"
        while not path.exists():
            if time.monotonic() > deadline:
                raise RankError(f"save(): rank {rank} has not written its part of {final} within {timeout:g} s")
            time.sleep(_POLL_SECONDS)
        report = json.loads(path.read_bytes())
        path.unlink()
        files.update(report["files"])
        for name, piece in report["tensors"].items():
            tensors.setdefault(name, []).append(piece)
    folders.finish(writing, final, {"ranks": len(named.ranks), "files": files, "tensors": tensors})


def _wait_until_named(writing: Path, final: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not (final / folders.MANIFEST).exists():
        gone = False
        with suppress(OSError):
            gone = not writing.exists() and not final.exists()
        if gone or time.monotonic() > deadline:
            why = "the first rank gave up" if gone else f"not finished within {timeout:g} s"
            raise RankError(f"save(): {final}: {why}; see the first rank's output")
        time.sleep(_POLL_SECONDS)
