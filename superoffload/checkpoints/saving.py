"""Saves a checkpoint: every rank writes what it holds, and the first one names the folder when all are done."""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from superoffload.adamw import AdamW
from superoffload.checkpoints import folder as folders
from superoffload.checkpoints.contents import (
    Named,
    Whole,
    check_extra,
    check_optimizer,
    group_values,
    name_everything,
    on_all_ranks,
    stepped,
)
from superoffload.checkpoints.part_files import (
    Part,
    complete,
    gave_up,
    hand_in,
    plan_part,
    tell_failure,
    wait_until_named,
    write_part,
)
from superoffload.engine.snapshot import Snapshot
from superoffload.errors import ArgumentError, DiskError, StateError
from superoffload.host.signals import held_signals
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.arguments import is_on

LOGGER = logging.getLogger("superoffload")
_ends: WeakKeyDictionary[Optimizer, threading.Event] = WeakKeyDictionary()  # end of each optimizer's last save


class _Outcome:
    """Runs the work of one checkpoint, here or in the background, and records its end and its error."""

    def __init__(self, folder: Path) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._folder = folder

    def run(self, work: Callable[[], None], *, in_background: bool) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self.error = error
                if in_background:  # logged because wait() may never be called
                    LOGGER.error("saving %s in the background failed: %s", self._folder, error)
            finally:
                self.ended.set()

        if in_background:
            threading.Thread(target=guarded, name="superoffload checkpoint").start()
        else:
            guarded()


class Saving:
    """Tracks a save in progress. Call ``wait()`` before the process ends, or to learn of errors."""

    def __init__(self, final: Path, snapshot: Snapshot | None, outcome: _Outcome) -> None:
        self.folder = final
        self._snapshot = snapshot
        self._outcome = outcome

    @property
    def done(self) -> bool:
        return self._outcome.ended.is_set()

    @property
    def largest_extra_bytes(self) -> int:
        """Returns the most bytes ever used for copies of state that changed before it was written."""
        return self._snapshot.largest_extra if self._snapshot is not None else 0

    def wait(self, timeout: float | None = None) -> Path:
        """Waits and returns the finished folder, or raises the error; earlier checkpoints are untouched either way."""
        if not self._outcome.ended.wait(timeout):
            raise StateError(f"{self.folder}: not written after {timeout:g} s; wait longer")
        if self._outcome.error is not None:
            raise self._outcome.error
        return self.folder


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
    final = folders.path_of(folder)
    if isinstance(optimizer, AdamW):
        optimizer.synchronize()
        optimizer.parts.refresh_written()
        optimizer.parts.state.await_snapshots()
    named = name_everything(model, optimizer)
    if named.session is None and any(is_dtensor(t) and t.device_mesh.size() > 1 for t in named.tensors.values()):
        raise ArgumentError("model: sharded over ranks; that needs superoffload.AdamW, or torch.distributed.checkpoint")
    part = plan_part(optimizer, named, copy=memory is not None)
    whole = named.whole("save()")
    state = on_all_ranks(named.session, "save()", lambda: _state_bytes(optimizer, whole, check_extra(extra)))
    part.keep_state(state)
    writing = _agree_on_folder(named, final)
    snapshot = None
    try:
        if isinstance(optimizer, AdamW):
            shards = [
                tracked.shard for _, _, tracked in stepped(optimizer, named) if tracked.shard.index in part.shards
            ]
            snapshot = Snapshot(shards, memory)
        outcome = _Outcome(final)
        saving = Saving(final, snapshot, outcome)
        work = partial(_write, part, named, writing, final, snapshot, keep, timeout, _ends.get(optimizer))
        with (
            nullcontext() if memory is None else held_signals()
        ):  # no signal comes between the snapshot and the start of its thread
            if isinstance(optimizer, AdamW) and snapshot is not None:
                optimizer.parts.state.begin_snapshot(snapshot)  # save() needs it too: another thread may run backward
            outcome.run(work, in_background=memory is not None)
        _ends[optimizer] = outcome.ended
    except BaseException:  # Ctrl-C, no memory, or no thread could be started: steps must not wait
        if snapshot is not None:
            snapshot.end()
        _give_up(named, writing)
        raise
    finally:
        if snapshot is not None and memory is None:  # again, in case a second Ctrl-C cut off the end in _write
            snapshot.end()
    return saving


def _give_up(named: Named, writing: Path) -> None:
    if named.is_first:
        folders.give_up(writing)
    else:
        tell_failure(writing, named.rank)


def _write(
    part: Part,
    named: Named,
    writing: Path,
    final: Path,
    snapshot: Snapshot | None,
    keep: int | None,
    timeout: float,
    previous: threading.Event | None,
) -> None:
    """Runs in the thread that writes. ``previous``: the end of the save before it."""
    try:
        with folders.naming(final, part.nbytes):
            written = write_part(part, named, writing, snapshot)
            if previous is not None:  # else keep could remove a checkpoint before this rank has seen its name
                previous.wait()
            hand_in(written, named, writing)
            if named.is_first:
                complete(named, writing, final, timeout)
    except BaseException as error:
        is_gone = isinstance(error, DiskError) and error.errno == errno.ENOENT and not writing.exists()
        _give_up(named, writing)
        if is_gone and not named.is_first:
            raise gave_up(final, "the first rank gave up, or this rank does not share that one's disk") from error
        if is_gone:
            raise StateError(
                f"{final}: not saved, another save under this name began; name each differently"
            ) from error
        raise
    if not named.is_first:
        wait_until_named(written, named, writing, final, timeout)
    elif keep is not None:
        folders.keep_only(final, keep)


def _state_bytes(optimizer: Optimizer, whole: Whole, extra: dict[str, Any]) -> bytes:
    """Returns the contents of ``state.pt``, after reading them back, so that nothing unreadable is saved."""
    groups = [{**values, "params": names} for values, names in zip(group_values(optimizer), whole.groups, strict=True)]
    content = {"groups": groups, "steps": whole.steps, "other": whole.other, "aliases": whole.aliases, "extra": extra}
    for index, group in enumerate(optimizer.param_groups):
        if is_on(group.get("amsgrad")):
            raise ArgumentError(
                f"optimizer: param group {index} has amsgrad=True, whose max_exp_avg_sq is not saved; save it with "
                "torch.save(optimizer.state_dict(), ...)"
            )
    try:
        return _safely(content)
    except _UNREADABLE as error:
        raise ArgumentError(
            f"{_unreadable(extra) or 'a value of a param group or of get_extra_state()'}: not saved, since only what "
            "torch.load(weights_only=True) reads can be: tensors, numbers, strings, lists, tuples, dicts of these"
        ) from error


# StateError: of an optimizer of ours, which a scheduler holds.
_UNREADABLE = (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, RecursionError, StateError)


def _safely(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return buffer.getvalue()


def _unreadable(extra: Mapping[str, Any]) -> str | None:
    for key, value in extra.items():
        try:
            _safely(value)
        except _UNREADABLE:
            return f"extra[{key!r}]: {type(value).__name__}"
    return None


def _agree_on_folder(named: Named, final: Path) -> Path:
    """Makes the folder on the first rank and tells all ranks its name."""
    name = ""
    error: Exception | None = None
    if named.is_first:
        try:
            name = folders.begin(final).name
        except (ArgumentError, DiskError) as failed:
            error = failed
    try:
        if named.session is not None:
            name = named.session.group.exchange_objects("save()", name)[0]
            named.session.agree("save()", error)
        if error is not None:
            raise error
    except BaseException:
        if named.is_first and name:
            folders.give_up(final.parent / name)
        raise
    return final.parent / name
