"""Loads a checkpoint: all ranks compare and verify everything before any of them changes anything."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superoffload.adamw import AdamW
from superoffload.checkpoints.contents import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MODEL,
    Named,
    Whole,
    check_optimizer,
    holding_of,
    is_extra_state,
    name_everything,
    piece_of,
)
from superoffload.checkpoints.folder import STATE, read_manifest
from superoffload.checkpoints.tensor_files import StoredPart, bytes_of, put_together
from superoffload.distributed.ownership import Box, Holding, like_parameter
from superoffload.errors import ArgumentError, shortened, shown
from superoffload.host.signals import held_signals
from superoffload.host.tensors import local_of
from superoffload.optimizer.arguments import is_on
from superoffload.optimizer.state import loaded_in_part
from superoffload.optimizer.state_dict import Values, blocks_of, check_saved_group

_MOST_STEPS = 1 << 53  # the largest count that float64 holds exactly


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Loads what ``save`` wrote, on any number of ranks, into ``model`` and ``optimizer``; returns its ``extra``.

    It reads only tensors in the safetensors format and what ``torch.load(weights_only=True)`` takes, and compares all
    of it with the manifest's checksums. ArgumentError names the file or the parameter that does not fit; nothing has
    changed then, on any rank. ``optimizer`` None: the weights alone.

    Files are mapped into memory, so it needs no memory beside the state, except for one tensor at a time where other
    ranks saved it in other parts. It raises StateError if something fails once it has begun to change values, such as a
    module's ``set_extra_state``. Then model and optimizer are loaded in part, and ``superoffload.AdamW`` refuses
    everything but another load.
    """
    given: Any = folder
    if not isinstance(given, (str, os.PathLike)):
        none = "; latest() gives None where there is none yet" if given is None else ""
        raise ArgumentError(f"folder={given!r}: expected a checkpoint's folder{none}")
    if optimizer is not None:
        check_optimizer(optimizer)
    named = name_everything(model, optimizer)
    whole = named.whole("load()")

    def verified() -> tuple[dict[str, Any], Callable[[], None]]:
        stored = _Checkpoint(Path(folder))
        other = _other_values(stored, named, whole)
        load_model = partial(_load_model, named, _model_values(stored, named, whole), other)
        if optimizer is None:
            return stored.extra, partial(_told_apart, load_model)
        state = _optimizer_state(stored, optimizer, named, whole)
        if not isinstance(optimizer, AdamW):
            return stored.extra, partial(_told_apart, partial(_load_torch, optimizer, named, state), load_model)
        optimizer.check_usable(to_load=True)
        ours = optimizer.parts.state
        return stored.extra, partial(ours.take_over, ours.check(state), "load()", load_model)

    extra, commit = named.on_all_ranks("load()", verified)
    commit()
    return extra


# ---- what is on disk, compared with its checksums -----------------------------------------------------------------


class _Checkpoint:
    """Reads the checkpoint in ``folder``, and compares all that it reads with the manifest's checksums.

    The attributes ``groups``, which list parameters by name, to ``extra`` are the contents of ``state.pt``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files, self.tensors = read_manifest(folder)
        self._file = cache(self._open)  # each file's header is read once
        path = folder / STATE
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArgumentError(f"{path}: {error.strerror}; the checkpoint is not whole") from error
        _compare(path, "", data, self._files[STATE]["sha256"])
        try:
            content = torch.load(io.BytesIO(data), weights_only=True)
            self.groups: list[dict[str, Any]] = content["groups"]
            self.steps: dict[str, int] = content["steps"]
            self.other: dict[str, Any] = content["other"]
            self.aliases: dict[str, str] = content["aliases"]
            self.extra: dict[str, Any] = dict(content["extra"])
            problem = self._problem()
        except Exception as error:  # of any kind: the unpickler assumes intact input
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise ArgumentError(f"{path}: cannot be read safely ({shortened(first)})") from error
        if problem:
            raise ArgumentError(f"{path}: {problem}; it is damaged, or not of superoffload")

    def _problem(self) -> str:
        """Returns what does not fit together in a checkpoint that another program may have made."""
        names = [*self.other, *self.aliases, *(name for group in self.groups for name in group["params"])]
        if not all(isinstance(name, str) for name in names):
            return "expected names of parameters and buffers"
        if not all(type(count) is int and 0 <= count <= _MOST_STEPS for count in self.steps.values()):
            return "expected numbers of steps"
        stepped, masters = set(self.steps), self.names(MASTER)
        if not stepped == self.names(EXP_AVG) == self.names(EXP_AVG_SQ) or masters not in (set(), stepped):
            return "expected exp_avg, exp_avg_sq, a number of steps and, of all or none, masters of the same parameters"
        if not all(MODEL + name in self.tensors for name in self.aliases.values()):
            return "expected tied names of tensors in the checkpoint"
        return ""

    def names(self, prefix: str) -> set[str]:
        return {key.removeprefix(prefix) for key in self.tensors if key.startswith(prefix)}

    def values(self, key: str, own: StoredPart) -> Values:
        """Returns the elements of ``own``, a piece of entry ``key``."""
        pieces = self.tensors[key]
        if pieces[0].piece.shape != own.shape:
            raise ArgumentError(
                f"{self.folder}: {shortened(key)} has shape {pieces[0].piece.shape}, expected {own.shape}; is it of "
                "another model?"
            )
        found = []
        for piece, file, digest in [one for one in pieces if one.piece.may_share(own)] or pieces[:1]:  # tells the dtype
            values = self._tensor(key, piece, file)
            _compare(self.folder / file, key, bytes_of(values), digest)
            found.append((piece, values))
        dtype = found[0][1].dtype
        return Values(own.shape, dtype, lambda: blocks_of(put_together(own, found, dtype).reshape(-1)))

    def _tensor(self, key: str, piece: StoredPart, file: str) -> Tensor:
        """Returns a piece as a view of its file's memory map."""
        from safetensors import SafetensorError

        try:
            with torch.device("cpu"):  # safetensors before 0.6 takes the caller's default
                values: Tensor = self._file(file).get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ArgumentError(f"{self.folder / file}: damaged ({shortened(str(error))})") from error
        if values.shape != piece.box.lengths:
            shapes = f"{tuple(values.shape)}, the manifest says {piece.box.lengths}"
            raise ArgumentError(f"{self.folder / file}: {key} has shape {shapes}")
        return values

    def _open(self, file: str) -> Any:
        """Opens a file of tensors, whose header has the manifest's checksum."""
        from safetensors import safe_open

        path = self.folder / file
        with open(path, "rb") as opened:
            start = opened.read(8)
            header = start + opened.read(min(int.from_bytes(start, "little"), self._files[file]["bytes"]))
        _compare(path, "its header", header, self._files[file]["header"])
        return safe_open(path, "pt")


def _compare(path: Path, what: str, data: bytes | memoryview, digest: str) -> None:
    if hashlib.sha256(data).hexdigest() != digest:
        which = f"{shortened(what)} differs" if what else "differs"
        raise ArgumentError(f"{path}: {which} from its checksum in the manifest; the file is damaged")


# ---- compared with model and optimizer ----------------------------------------------------------------------------


def _only(sides: Mapping[str, set[str]]) -> str:
    """Returns some names of each side that has any."""
    return "; ".join(f"{who}{', '.join(map(shortened, sorted(names)[:5]))}" for who, names in sides.items() if names)


def _refuse_differing(stored: _Checkpoint, what: str, saved: set[str], ours: set[str]) -> None:
    only = _only({f"the model lacks {what}": saved - ours, f"the checkpoint lacks {what}": ours - saved})
    if only:
        raise ArgumentError(f"{stored.folder}: {only}; is it of another model?")


def _other_values(stored: _Checkpoint, named: Named, whole: Whole) -> dict[str, Any]:
    """Returns what modules' ``set_extra_state`` will get; other entries that are not tensors must equal the model's."""
    tensors = set(filter(is_extra_state, stored.names(MODEL)))  # extra state that was a tensor when it was saved
    _refuse_differing(stored, "the extra state ", set(stored.other) | tensors, set(whole.other))
    found = {}
    for name in named.other:  # on another rank there may be more
        value = _whole_tensor(stored, MODEL + name) if name in tensors else stored.other[name]
        module = named.modules.get(name)
        if module is not None and type(module).set_extra_state is not nn.Module.set_extra_state:
            found[name] = value
        elif is_extra_state(name):
            raise ArgumentError(
                f"{stored.folder}: {name}: the module has get_extra_state and no set_extra_state; add it"
            )
        elif not _equal(value, named.other[name]):
            raise ArgumentError(
                f"{stored.folder}: {name} is {shown(value)}, the model's is {shown(named.other[name])}; it is not a "
                "tensor and cannot be loaded; build the model as it was when it was saved"
            )
    return found


def _whole_tensor(stored: _Checkpoint, key: str) -> Tensor:
    shape = stored.tensors[key][0].piece.shape
    values = stored.values(key, StoredPart(shape, Box.whole(shape), flat=False))
    tensor = torch.empty(shape, dtype=values.dtype, device="cpu")
    values.copy_to(tensor.view(-1))
    return tensor


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):  # the values hold tensors
        return False


def _model_values(stored: _Checkpoint, named: Named, whole: Whole) -> dict[str, Values]:
    """Returns this rank's part of the model's own tensors."""
    aliases = stored.aliases
    saved = {name for name in stored.names(MODEL) if not is_extra_state(name)}
    _refuse_differing(stored, "", saved | set(aliases), whole.names)
    for tied, name in named.aliases.items():
        one, other = (stored.tensors[MODEL + aliases.get(either, either)] for either in (tied, name))
        if [piece.sha256 for piece in one] != [piece.sha256 for piece in other]:
            raise ArgumentError(
                f"{stored.folder}: {tied} differs from {name}, and is tied to it in the model; untie them"
            )
    values = {}
    for name, tensor in named.tensors.items():
        found = stored.values(MODEL + aliases.get(name, name), piece_of(tensor, holding_of(name, tensor)))
        if found.dtype != tensor.dtype:
            raise ArgumentError(f"{stored.folder}: {name} is {found.dtype}, expected {tensor.dtype}; convert the model")
        values[name] = found
    return values


def _optimizer_state(stored: _Checkpoint, optimizer: Optimizer, named: Named, whole: Whole) -> dict[str, Any]:
    """Returns the layout of ``torch.optim.Optimizer.load_state_dict``, with ``Values`` in place of tensors."""
    groups = stored.groups
    _refuse_groups(stored, [group["params"] for group in groups], whole.groups)
    positions = {name: i for i, name in enumerate(name for names in named.groups for name in names)}
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for index, (values, names) in enumerate(zip(groups, named.groups, strict=True)):
        try:
            check_saved_group(index, values)
        except (ArgumentError, TypeError) as error:
            raise ArgumentError(f"{stored.folder}: {shortened(str(error))}") from None
        for whose, group in (("the checkpoint's", values), ("the optimizer's", optimizer.param_groups[index])):
            if not isinstance(optimizer, AdamW) and is_on(group.get("amsgrad")):  # torch would lack or drop its maxima
                raise ArgumentError(
                    f"{stored.folder}: {whose} param group {index} has amsgrad=True, and the checkpoint has no "
                    "max_exp_avg_sq; make the optimizer without amsgrad, or load the model alone (optimizer=None)"
                )
        kept = {key: value for key, value in values.items() if key != "param_names"}  # of another part of the model
        result["param_groups"].append({**kept, "params": [positions[name] for name in names]})
    wanted = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
    if isinstance(optimizer, AdamW):
        wanted["master"] = MASTER
    for name, param in named.params.items():
        if name not in stored.steps:
            continue
        holding = optimizer.parts.params.holding_of(param) if isinstance(optimizer, AdamW) else holding_of(name, param)
        entry: dict[str, Any] = {"step": stored.steps[name]}
        for key, prefix in wanted.items():
            if prefix + name in stored.tensors:
                entry[key] = _as_in_memory(stored.values(prefix + name, piece_of(param, holding)), holding)
        result["state"][positions[name]] = entry
    return result


def _refuse_groups(stored: _Checkpoint, theirs: Sequence[list[str]], ours: Sequence[list[str]]) -> None:
    if len(theirs) != len(ours):
        raise ArgumentError(f"{stored.folder}: {len(theirs)} param groups, the optimizer has {len(ours)}")
    for index, (saved, mine) in enumerate(zip(map(set, theirs), map(set, ours), strict=True)):
        only = _only({"only the checkpoint's has ": saved - mine, "only the optimizer's has ": mine - saved})
        if only:
            raise ArgumentError(f"{stored.folder}: param group {index} differs: {only}")


def _as_in_memory(values: Values, holding: Holding) -> Values:
    """Returns values in the parameter's order in memory; another order on disk needs a copy of one tensor."""
    if holding.order is None:
        return values

    def read() -> Iterator[tuple[int, Tensor]]:
        whole = torch.empty(values.shape, dtype=values.dtype, device="cpu")
        values.copy_to(whole.view(-1))
        yield from blocks_of(holding.part_of_whole(whole))

    return Values(values.shape, values.dtype, read)


# ---- put into place -----------------------------------------------------------------------------------------------


def _told_apart(*works: Callable[[], None]) -> None:
    """Runs what changes something; its failure, after it was verified, means a state loaded in part."""
    try:
        with held_signals():
            for work in works:
                work()
    except Exception as error:
        raise loaded_in_part("load()", error) from error


@torch.no_grad()
def _load_model(named: Named, values: Mapping[str, Values], other: Mapping[str, Any]) -> None:
    for name, found in values.items():
        local = local_of(named.tensors[name])
        flat = local.view(-1) if local.is_contiguous() else local.new_empty(local.numel())
        found.copy_to(flat)
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))
        torch.autograd.graph.increment_version(named.tensors[name])
    for name, value in other.items():
        set_extra_state: Any = named.modules[name].set_extra_state
        set_extra_state(value)


@torch.no_grad()
def _load_torch(optimizer: Optimizer, named: Named, state: dict[str, Any]) -> None:
    """Loads into new tensors, after the old ones are freed."""
    optimizer.state.clear()
    for position, (name, param) in enumerate(named.params.items()):
        entry = state["state"].get(position, {})
        for key, value in entry.items():
            if isinstance(value, Values):
                local = local_of(param)
                flat = torch.empty(local.numel(), dtype=value.dtype, device=local.device)
                value.copy_to(flat)
                entry[key] = like_parameter(param, holding_of(name, param), flat)
        if "step" in entry:
            entry["step"] = torch.tensor(float(entry["step"]), device="cpu")
    optimizer.load_state_dict(state)
