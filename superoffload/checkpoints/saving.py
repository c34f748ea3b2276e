"""Saves a checkpoint: every rank writes what it holds, and the first one names the folder when all are done.

While they write, the ranks tell each other by files in the folder, since training may use every other channel.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

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
    Whole,
    check_optimizer,
    holding_of,
    name_everything,
    piece_of,
)
from superoffload.checkpoints.folder import STATE
from superoffload.checkpoints.tensor_files import StoredPart, TensorFile, flat_runs
from superoffload.distributed.ownership import Holding, OwnersTable
from superoffload.engine import moments
from superoffload.engine.master_halves import join
from superoffload.engine.snapshot import ShardState, Snapshot
from superoffload.errors import ArgumentError, DiskError, RankError, StateError
from superoffload.host.signals import held_signals
from superoffload.host.tensors import is_dtensor, local_of
from superoffload.optimizer.arguments import is_on
from superoffload.optimizer.tracked_param import TrackedParam

LOGGER = logging.getLogger("superoffload")
_ends: WeakKeyDictionary[Optimizer, threading.Event] = WeakKeyDictionary()  # end of each optimizer's last save


class Saving:
    """Tracks a save in progress. Call ``wait()`` before the process ends, or to learn of errors."""

    def __init__(self, final: Path, snapshot: Snapshot | None) -> None:
        self.folder = final
        self._snapshot = snapshot
        self._ended = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    @property
    def largest_extra_bytes(self) -> int:
        """Returns the most bytes ever used for copies of state that changed before it was written."""
        return self._snapshot.largest_extra if self._snapshot is not None else 0

    def wait(self, timeout: float | None = None) -> Path:
        """Waits and returns the finished folder, or raises the error; earlier checkpoints are untouched either way."""
        if not self._ended.wait(timeout):
            raise StateError(f"{self.folder}: not written after {timeout:g} s; wait longer")
        if self._error is not None:
            raise self._error
        return self.folder

    def _run(self, work: Callable[[], None], in_background: bool) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
            if in_background:  # logged because wait() may never be called
                LOGGER.error("saving %s in the background failed: %s", self.folder, error)
        finally:
            self._ended.set()


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

    The folder appears under its name when everything in it is on the disk. With several ranks all of them call this,
    with a folder that all of them see; every rank writes what it holds.

    Arguments:
        extra: values that ``torch.load(weights_only=True)`` reads: state_dicts of schedulers, counters, RNG states.
        keep: then remove the oldest checkpoints of this series (names alike up to their last number) until this many
            are left; never this one, newer ones or links.
        timeout: seconds for which the first rank, once it has written its part, waits for the parts of the others, and
            for which these wait for a sign of life from the first.

    Raises ArgumentError if the folder exists or cannot be made; DiskError, also an OSError, if the disk is full or
    fails; RankError for lost ranks. Earlier checkpoints are untouched then.
    """
    return _begin(folder, model, optimizer, extra, keep, timeout, memory=None).wait()


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
    """Saves while training goes on: state that a later step is about to change is copied, or written first.

    ``memory``: bytes that copies may take; when they are used up, the step waits until its part is written. Buffers are
    copied at once. Parameters that do not train are read in place and must not be written meanwhile.
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
    """Plans and starts a save, in this thread if ``memory`` is None."""
    check_optimizer(optimizer)
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ArgumentError(f"keep={keep!r}: expected a whole number of at least 1, or None")
    final, in_background = folders.path_of(folder), memory is not None
    if isinstance(optimizer, AdamW):
        optimizer.synchronize()
        optimizer.parts.refresh_written()
        optimizer.parts.state.await_snapshots()
    named = name_everything(model, optimizer)
    if named.session is None and any(is_dtensor(t) and t.device_mesh.size() > 1 for t in named.tensors.values()):
        raise ArgumentError("model: sharded over ranks; that needs superoffload.AdamW, or torch.distributed.checkpoint")
    part = _plan(optimizer, named, copy=in_background)
    whole = named.whole("save()")
    state = named.on_all_ranks("save()", lambda: _state_bytes(optimizer, whole, extra))
    writing = _agree_on_folder(named, final)
    job = Job(named, part, state, writing, final, keep, timeout, _ends.get(optimizer))
    try:
        if isinstance(optimizer, AdamW):
            job.snapshot = Snapshot([tracked.shard for _, tracked in part.shards.values()], memory)
        saving = Saving(final, job.snapshot)
        # No signal comes between the snapshot and the start of its thread.
        with held_signals() if in_background else nullcontext():
            if isinstance(optimizer, AdamW) and job.snapshot is not None:
                # save() needs it too: another thread may run backward
                optimizer.parts.state.begin_snapshot(job.snapshot)
            if in_background:
                threading.Thread(target=saving._run, args=(job.run, True), name="superoffload checkpoint").start()
            else:
                saving._run(job.run, False)
        _ends[optimizer] = saving._ended
    except BaseException:  # Ctrl-C, no memory, or no thread could be started: steps must not wait
        job.end_snapshot()
        job.give_up()
        raise
    finally:
        if not in_background:  # again, in case a second Ctrl-C cut off the end in job.run
            job.end_snapshot()
    return saving


def _agree_on_folder(named: Named, final: Path) -> Path:
    """Makes the folder on the first rank and tells all ranks its name."""
    made: list[Path] = []

    def make() -> str:
        if named.is_first:
            made.append(folders.begin(final))
        return made[0].name if made else ""

    try:
        name = named.on_all_ranks("save()", make)
        told: list[str] = named.told_by_all("save()", name)
        return final.parent / told[0]
    except BaseException:
        for folder in made:
            folders.give_up(folder)
        raise


# ---- state.pt -----------------------------------------------------------------------------------------------------

# StateError: of an optimizer of ours, which a scheduler holds.
_UNREADABLE = (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, RecursionError, StateError)


def _state_bytes(optimizer: Optimizer, whole: Whole, extra: Mapping[str, Any] | None) -> bytes:
    """Returns the contents of ``state.pt``, after reading them back, so that nothing unreadable is saved."""
    if extra is not None and not isinstance(extra, Mapping):
        raise ArgumentError(f"extra: {type(extra).__name__}, expected a dict, such as {{'scheduler': ...}}")
    groups = []
    for index, (group, names) in enumerate(zip(optimizer.param_groups, whole.groups, strict=True)):
        if is_on(group.get("amsgrad")):
            raise ArgumentError(
                f"optimizer: param group {index} has amsgrad=True, whose max_exp_avg_sq is not saved; save it with "
                "torch.save(optimizer.state_dict(), ...)"
            )
        values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**values, "params": names})
    content = {"groups": groups, "steps": whole.steps, "other": whole.other, "aliases": whole.aliases}
    try:
        return _safely({**content, "extra": dict(extra or {})})
    except _UNREADABLE as error:
        raise ArgumentError(
            f"{_unreadable(extra or {})}: not saved, since only what torch.load(weights_only=True) reads can be: "
            "tensors, numbers, strings, lists, tuples, dicts of these"
        ) from error


def _safely(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return buffer.getvalue()


def _unreadable(extra: Mapping[str, Any]) -> str:
    for key, value in extra.items():
        try:
            _safely(value)
        except _UNREADABLE:
            return f"extra[{key!r}]: {type(value).__name__}"
    return "a value of a param group or of get_extra_state()"


# ---- what this rank writes ----------------------------------------------------------------------------------------


@dataclass
class _Part:
    """Holds what this rank writes: by entry the dtype and the place in the whole tensor, and the sources of values."""

    entries: dict[str, tuple[torch.dtype, StoredPart]] = field(default_factory=dict)
    shards: dict[int, tuple[str, TrackedParam]] = field(default_factory=dict)  # by index
    plain: list[tuple[str, Tensor, int | None]] = field(default_factory=list)  # with its version; None: a copy


def _plan(optimizer: Optimizer, named: Named, *, copy: bool) -> _Part:
    """Plans this rank's part. ``copy``: copies buffers, which may change before they are written."""
    part, rest = _Part(), dict(named.tensors)
    known: Any = optimizer.parts.params if isinstance(optimizer, AdamW) else {}
    for name, param in named.params.items():
        tracked = known.get(param)
        if tracked is None:
            continue
        rest.pop(name, None)
        shard = tracked.shard
        if named.session is None or named.session.writer_of(shard.index) == named.rank:  # first of those that own it
            piece = piece_of(param, tracked.holding)
            part.shards[shard.index] = (name, tracked)
            part.entries[MODEL + name] = param.dtype, piece
            part.entries[MASTER + name] = torch.float32, piece
            part.entries[EXP_AVG + name] = moments.shown_dtype(shard.exp_avg.dtype), piece
            part.entries[EXP_AVG_SQ + name] = moments.shown_dtype(shard.exp_avg_sq.dtype), piece
    trains = {id(param) for param in named.params.values()}
    for name, holding in _written_here(named, rest):
        local = local_of(rest[name])
        buffer = copy and not isinstance(rest[name], nn.Parameter) and id(rest[name]) not in trains
        part.entries[MODEL + name] = local.dtype, piece_of(rest[name], holding)
        part.plain.append((MODEL + name, local.clone() if buffer else local, None if buffer else local._version))
    if not isinstance(optimizer, AdamW):
        _plan_state_of_torch(part, optimizer, named)
    return part


def _written_here(named: Named, tensors: Mapping[str, Tensor]) -> list[tuple[str, Holding]]:
    """Returns the tensors without optimizer state whose part this rank writes. Collective."""
    holdings = {name: holding_of(name, tensor) for name, tensor in tensors.items()}
    boxes = {name: (one.box.offsets, one.box.lengths) for name, one in holdings.items()}
    told, table, written = named.told_by_all("save(): parts", boxes), OwnersTable(), []
    for name, holding in holdings.items():
        has = {rank: its[name] for rank, its in zip(named.ranks, told, strict=True) if name in its}
        if table.owners(name, holding.shape, tuple(has), list(has.values())).writer_of(named.rank) == named.rank:
            written.append((name, holding))
    return written


def _plan_state_of_torch(part: _Part, optimizer: Optimizer, named: Named) -> None:
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
                part.entries[prefix + name] = state[key].dtype, piece_of(param, holding_of(name, param))
                part.plain.append((prefix + name, local_of(state[key]), None))


def _write_shard(file: TensorFile, name: str, tracked: TrackedParam, values: ShardState) -> None:
    ordered = partial(tracked.holding.in_own_order, shape=tracked.param.shape)
    stored, upper = ordered(values.master), values.halves
    if upper and tracked.holding.order is not None:  # a file has another order than its memory, also across runs
        upper = (ordered(torch.cat(upper)),)
    file.write(MASTER + name, _masters(stored, upper))
    for prefix, moment, form in (
        (EXP_AVG, values.exp_avg, moments.EXP_AVG),
        (EXP_AVG_SQ, values.exp_avg_sq, moments.EXP_AVG_SQ),
    ):
        file.write(prefix + name, flat_runs(ordered(moments.read_moment(moment, stored.numel(), form))))
    file.write(MODEL + name, chain.from_iterable(map(flat_runs, upper or (stored,))))  # the file rounds them


def _masters(stored: Tensor, upper: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields masters in fp32; with ``upper``, ``stored`` has the remainders of split ones."""
    if not upper:
        yield from flat_runs(stored)
    for half, rest in zip(upper, stored.split([half.numel() for half in upper]) if upper else (), strict=True):
        yield from map(join, flat_runs(half), flat_runs(rest))


# ---- written ------------------------------------------------------------------------------------------------------


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@dataclass
class Job:
    """Writes this rank's part of one checkpoint, here or in a thread; the first rank then makes it a whole one."""

    named: Named
    part: _Part
    state: bytes  # all but the large tensors; the first rank writes it
    writing: Path
    final: Path
    keep: int | None
    timeout: float
    previous: threading.Event | None  # the end of this optimizer's save before
    snapshot: Snapshot | None = None

    def run(self) -> None:
        try:
            # With several ranks each save has its own mark, by which a rank recognizes its file.
            mark = {"save": self.writing.name.rpartition("-")[2]} if len(self.named.ranks) > 1 else {}
            entries = {key: (dtype, piece.box.lengths) for key, (dtype, piece) in self.part.entries.items()}
            file = TensorFile(self.writing / file_name(self.named.rank), entries, {"format": "pt", **mark})
            with folders.naming(self.final, file.nbytes + len(self.state)):
                self.write_part(file)
                if self.previous is not None:  # else keep could remove a checkpoint before this rank has seen its name
                    self.previous.wait()
                self.hand_in(file)
                if self.named.is_first:
                    self.complete()
        except BaseException as error:
            self.end_snapshot()  # also if the file could not be made: steps must not wait for it
            is_gone = isinstance(error, DiskError) and error.errno == errno.ENOENT and not self.writing.exists()
            self.give_up()
            if is_gone and not self.named.is_first:
                why = "the first rank gave up, or this rank does not share that one's disk"
                raise RankError(f"save(): {self.final}: {why}; see the first rank's output") from error
            if is_gone:
                raise StateError(
                    f"{self.final}: not saved, another save under this name began; name each differently"
                ) from error
            raise
        if not self.named.is_first:
            self.wait_until_named(file.header)
        elif self.keep is not None:
            folders.keep_only(self.final, self.keep)

    def end_snapshot(self) -> None:
        if self.snapshot is not None:
            self.snapshot.end()

    def give_up(self) -> None:
        if self.named.is_first:
            folders.give_up(self.writing)
        else:  # tells the first rank not to wait, by an empty file, which often fits on a full disk
            with suppress(OSError):
                self._note(self.named.rank, "failed").touch()

    def write_part(self, file: TensorFile) -> None:
        """Writes this rank's tensors; the first rank also writes ``state.pt``."""
        with file:
            if self.snapshot is not None:
                self.snapshot.read_all(lambda index, values: _write_shard(file, *self.part.shards[index], values))
            for name, tensor, _ in self.part.plain:
                file.write(name, flat_runs(tensor))
            for name, tensor, version in self.part.plain:
                if version is not None and tensor._version != version:
                    name = name.removeprefix(MODEL)
                    raise StateError(f"{name}: written to while it was saved; save it again, with save()")
        self.end_snapshot()
        if self.named.is_first:
            folders.write_durably(self.writing / STATE, self.state)

    # ---- the parts of all ranks -----------------------------------------------------------------------------------

    def _note(self, rank: int, kind: str) -> Path:
        """Returns the file by which a rank tells the first one that it has written its part, or failed."""
        return self.writing / f".{file_name(rank)}.{kind}"

    def hand_in(self, file: TensorFile) -> None:
        """Tells the first rank that this rank's part is on the disk."""
        files: dict[str, Any] = {file.path.name: {"bytes": file.nbytes, "header": _sha256(file.header)}}
        if self.named.is_first:
            files[STATE] = {"bytes": len(self.state), "sha256": _sha256(self.state)}
        tensors = {
            key: {**piece.as_json(), "file": file.path.name, "sha256": file.digests[key]}
            for key, (_, piece) in self.part.entries.items()
        }
        part = self._note(self.named.rank, "part")
        folders.write_durably(part, json.dumps({"files": files, "tensors": tensors}).encode())
        os.rename(part, self._note(self.named.rank, "json"))

    def complete(self) -> None:
        """Waits on the first rank until all others have written their part, then gives the folder its name."""
        files: dict[str, Any] = {}
        tensors: dict[str, list[Any]] = {}
        deadline, pauses = time.monotonic() + self.timeout, _pauses()
        for rank in self.named.ranks:
            note = self._note(rank, "json")
            while not note.exists():
                why = ""
                if self._note(rank, "failed").exists():
                    why = f"could not write its part of {self.final}; its output says why"
                elif time.monotonic() > deadline:
                    why = f"has not written its part of {self.final} within {self.timeout:g} s"
                if why:
                    raise RankError(f"save(): {self.named.called(rank)} {why}")
                self.writing.stat()  # raises where another save under this name has removed it
                with suppress(OSError):
                    os.utime(self.writing)  # tells the ranks that wait for the name that this one is alive
                next(pauses)
            report = json.loads(note.read_bytes())
            note.unlink()
            files.update(report["files"])
            for name, piece in report["tensors"].items():
                tensors.setdefault(name, []).append(piece)
        content = {"ranks": len(self.named.ranks), "files": files, "tensors": tensors}
        folders.finish(self.writing, self.final, content)

    def wait_until_named(self, header: bytes) -> None:
        """Waits on the other ranks until the folder with their part has its name and is on the disk.

        They wait as long as the first rank gives signs of life. Their part is already handed in, so an error here does
        not mean that the checkpoint fails; the first rank decides that.
        """
        leads = self.writing / file_name(self.named.ranks[0])
        signs: list[int] | None = None
        deadline, absent = 0.0, 0
        for _ in _pauses():
            there = self._there()
            if self.final.name in there and self.writing.name not in there and self._is_ours(header):
                return folders.confirm(self.final)
            absent = 0 if self.writing.name in there else absent + 1
            if absent > 1:  # a rename may have been under way at the first look
                why = "another save has taken this name" if self.final.name in there else "the first rank gave up"
                raise RankError(f"save(): {self.final}: {why}; see the first rank's output")
            seen = _times_of(self.writing, leads)
            if seen != signs:
                signs, deadline = seen, time.monotonic() + self.timeout
            if time.monotonic() > deadline:
                raise RankError(
                    f"save(): {self.final}: no sign of life of the first rank within {self.timeout:g} s; see its "
                    "output. If it goes on, the checkpoint may still be finished"
                )

    def _there(self) -> set[str]:
        """Returns which of the two names exist, from a listing: NFS may remember for a while that a name was absent."""
        try:
            return {self.writing.name, self.final.name} & set(os.listdir(self.final.parent))
        except PermissionError:  # the folder can be written but not read
            return {path.name for path in (self.writing, self.final) if path.exists()}
        except OSError:
            return {self.writing.name}  # unknown: go on until the deadline

    def _is_ours(self, header: bytes) -> bool:
        """Returns whether the file is this save's; the manifest would tell too, but may have hundreds of MB."""
        name = file_name(self.named.rank)
        try:
            with open(self.final / name, "rb") as file:
                return file.read(len(header)) == header
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            why = f"{name} could not be read ({error.strerror}); check the disk"
            raise DiskError(error.errno, f"{self.final}: written, but {why}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _pauses() -> Iterator[None]:
    """Sleeps between two looks, ever longer: hundreds of ranks may watch one folder."""
    seconds = 0.02
    while True:
        yield
        time.sleep(seconds)
        seconds = min(seconds * 1.1, 0.5)


def _times_of(*paths: Path) -> list[int]:
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(os.stat(path).st_mtime_ns)
    return times


# ---- the model alone, for other programs --------------------------------------------------------------------------


@torch.no_grad()
def export_weights(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: AdamW | None = None, *, masters: bool = False
) -> Path:
    """Writes ``model.safetensors``, and ``config.json`` for a transformers model; ``from_pretrained`` loads it.

    ``masters``: writes the optimizer's fp32 masters instead of the published parameters. With sharded parameters all
    ranks call this; they gather one parameter after the other, and the first rank writes.
    """
    if masters and not isinstance(optimizer, AdamW):
        raise ArgumentError("masters=True needs optimizer, a superoffload.AdamW")
    named = name_everything(model, optimizer)
    if named.has_parts:
        raise ArgumentError(
            "model: each rank has a part of it, such as a pipeline stage, expected the whole model on all ranks, else "
            "the file would lack the others' parts; save() on all ranks, load() it into the whole model in one "
            "process, and call export_weights() there"
        )
    if isinstance(optimizer, AdamW):
        optimizer.synchronize()
        optimizer.parts.refresh_written()
    path = folders.path_of(folder) / "model.safetensors"
    states = optimizer.state if optimizer is not None and masters else {}
    values: dict[str, Any] = {
        name: states[tensor]["master"] if tensor in states else tensor.detach()
        for name, tensor in named.tensors.items()
    }
    part = folders.hidden(path, "writing")
    file = TensorFile(part, {name: (one.dtype, one.shape) for name, one in values.items()}, {"format": "pt"})
    with folders.naming(path, file.nbytes), ExitStack() as stack:
        if named.is_first:
            folders.make_parents(path)
            stack.enter_context(_replacing(part, path))
            stack.enter_context(file)
        for name, value in values.items():
            whole = value.full_tensor() if is_dtensor(value) else value
            if named.is_first:
                file.write(name, flat_runs(whole))
        config: Any = getattr(model, "config", None)
        if named.is_first and hasattr(config, "to_json_string"):
            path_of_config = path.with_name("config.json")
            part = folders.hidden(path_of_config, "writing")
            with _replacing(part, path_of_config):
                folders.write_durably(part, config.to_json_string().encode())
    return path


@contextmanager
def _replacing(part: Path, path: Path) -> Iterator[None]:
    """Gives a temporary file its name once it is whole and on the disk."""
    try:
        yield
        os.replace(part, path)
        folders.sync_folder(path.parent)
    finally:
        folders.give_up(part)
