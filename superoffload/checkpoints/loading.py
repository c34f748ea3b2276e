"""Loads a checkpoint: all ranks compare and verify everything before any of them changes anything."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
    on_all_ranks,
    piece_of,
)
from superoffload.checkpoints.folder import STATE, check_size, read_manifest
from superoffload.checkpoints.tensor_files import Piece, bytes_of, copy_shared, may_share
from superoffload.distributed.ownership import Box, Holding, like_parameter
from superoffload.errors import ArgumentError, shortened, shown
from superoffload.host.signals import held_signals
from superoffload.host.tensors import local_of
from superoffload.optimizer.arguments import is_on
from superoffload.optimizer.state import loaded_in_part
from superoffload.optimizer.state_dict import Values, blocks_of, check_saved_group

# ---- what is on disk, compared with its checksums -------------------------------------------------------------------

_MOST_STEPS = 1 << 53  # the largest count that float64 holds exactly


@dataclass(frozen=True)
class StoredState:
    """Holds the contents of ``state.pt``. ``groups`` list parameters by name."""

    groups: list[dict[str, Any]]
    steps: dict[str, int]
    other: dict[str, Any]
    aliases: dict[str, str]
    extra: dict[str, Any]


class Stored:
    """Reads the checkpoint in ``folder``. ``tensors``: each entry's pieces, with their files and checksums."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = read_manifest(folder)
        self.tensors: dict[str, list[tuple[Piece, str, str]]] = {
            key: [(Piece.of_json(one), one["file"], one["sha256"]) for one in parts]
            for key, parts in manifest["tensors"].items()
        }
        self._files = manifest["files"]
        for name, expected in self._files.items():
            check_size(folder / name, expected["bytes"])
        self.state = self._read_state()
        self._file = cache(self._open)  # each file's header is read once

    def _read_state(self) -> StoredState:
        path = self.folder / STATE
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ArgumentError(f"{path}: {error.strerror}; the checkpoint is not whole") from error
        self._compare(path, "", data, self._files[STATE]["sha256"])
        try:
            state = StoredState(**torch.load(io.BytesIO(data), weights_only=True))
            problem = self._problem_of(state)
        except Exception as error:  # of any kind: the unpickler assumes intact input
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise ArgumentError(f"{path}: cannot be read safely ({shortened(first)})") from error
        if problem:
            raise ArgumentError(f"{path}: {problem}; it is damaged, or not of superoffload")
        return state

    def _problem_of(self, state: StoredState) -> str:
        """Returns what does not fit together in a checkpoint that another program may have made."""
        names = [*state.other, *state.aliases, *(name for group in state.groups for name in group["params"])]
        if not all(isinstance(name, str) for name in names):
            return "expected names of parameters and buffers"
        if not all(type(count) is int and 0 <= count <= _MOST_STEPS for count in state.steps.values()):
            return "expected numbers of steps"
        stepped, masters = set(state.steps), self._named(MASTER)
        if not stepped == self._named(EXP_AVG) == self._named(EXP_AVG_SQ) or masters not in (set(), stepped):
            return "expected exp_avg, exp_avg_sq, a number of steps and, of all or none, masters of the same parameters"
        if not all(MODEL + name in self.tensors for name in state.aliases.values()):
            return "expected tied names of tensors in the checkpoint"
        return ""

    def _named(self, prefix: str) -> set[str]:
        return {key.removeprefix(prefix) for key in self.tensors if key.startswith(prefix)}

    def digests(self, key: str) -> list[str]:
        return [digest for _, _, digest in self.tensors[key]]

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key][0][0].shape

    def values(self, key: str, own: Piece) -> Values:
        """Returns the elements of ``own``, a piece of entry ``key``. Compares all that it needs with the checksums."""
        if self.shape(key) != own.shape:
            raise ArgumentError(
                f"{self.folder}: {shortened(key)} has shape {self.shape(key)}, expected {own.shape}; is it of "
                "another model?"
            )
        found = []
        for index, (piece, file, digest) in enumerate(self.tensors[key]):
            wanted = may_share(piece, own)
            if wanted or not index:  # the first one tells the dtype
                values = self._tensor(key, piece, file)
                dtype = values.dtype
            if wanted:
                self._compare(self.folder / file, key, bytes_of(values), digest)
                found.append((piece, values))

        def read() -> Iterator[tuple[int, Tensor]]:
            if len(found) == 1 and found[0][0] == own:
                yield from blocks_of(found[0][1].reshape(-1))
                return
            part = torch.empty(own.box.lengths, dtype=dtype, device="cpu")  # of one tensor at a time
            for piece, values in found:
                copy_shared(piece, values, own, part)
            yield from blocks_of(part.view(-1))

        return Values(own.shape, dtype, read)

    def _tensor(self, key: str, piece: Piece, file: str) -> Tensor:
        """Returns a piece as a view of its file's memory map."""
        from safetensors import SafetensorError

        try:
            values: Tensor = self._file(file).get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ArgumentError(f"{self.folder / file}: damaged ({shortened(str(error))})") from error
        if values.shape != piece.box.lengths:
            raise ArgumentError(
                f"{self.folder / file}: {key} has shape {tuple(values.shape)}, the manifest says {piece.box.lengths}"
            )
        return values

    def _open(self, file: str) -> Any:
        """Opens a file of tensors, whose header has the manifest's checksum."""
        from safetensors import safe_open

        path = self.folder / file
        with open(path, "rb") as opened:
            start = opened.read(8)
            header = start + opened.read(min(int.from_bytes(start, "little"), self._files[file]["bytes"]))
        self._compare(path, "its header", header, self._files[file]["header"])
        return safe_open(path, "pt")

    @staticmethod
    def _compare(path: Path, what: str, data: bytes | memoryview, digest: str) -> None:
        if hashlib.sha256(data).hexdigest() != digest:
            which = f"{shortened(what)} differs" if what else "differs"
            raise ArgumentError(f"{path}: {which} from its checksum in the manifest; the file is damaged")


# ---- loading --------------------------------------------------------------------------------------------------------


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
    path = _folder(folder)
    if optimizer is not None:
        check_optimizer(optimizer)
    named = name_everything(model, optimizer)
    whole = named.whole("load()")

    def verified() -> tuple[Stored, Callable[[], None]]:
        stored = Stored(path)
        other = _other_values(stored, named, whole)
        values = _model_values(stored, named, whole)
        state = None if optimizer is None else _optimizer_state(stored, optimizer, named, whole)
        return stored, _prepared(optimizer, named, state, lambda: _load_model(named, values, other))

    stored, commit = on_all_ranks(named.session, "load()", verified)
    commit()
    return dict(stored.state.extra)


def _folder(given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        none = "; latest() gives None where there is none yet" if given is None else ""
        raise ArgumentError(f"folder={given!r}: expected a checkpoint's folder{none}")
    return Path(given)


def _prepared(
    optimizer: Optimizer | None,
    named: Named,
    state: dict[str, Any] | None,
    load_model: Callable[[], None],
) -> Callable[[], None]:
    """Returns the work that remains once all ranks have verified what they need."""
    if optimizer is None or state is None:
        return lambda: _told_apart(load_model)
    if isinstance(optimizer, AdamW):
        optimizer.check_usable(to_load=True)
        ours = optimizer.parts.state
        read = ours.check(state)
        return lambda: ours.take_over(read, "load()", load_model)

    def load_both() -> None:
        _load_torch(optimizer, named, state)
        load_model()

    return lambda: _told_apart(load_both)


def _told_apart(work: Callable[[], None]) -> None:
    """Runs ``work``, which changes something; its failure, after it was verified, means a state loaded in part."""
    try:
        with held_signals():
            work()
    except Exception as error:
        raise loaded_in_part("load()", error) from error


# ---- compared ---------------------------------------------------------------------------------------------------


def _refuse_differing(stored: Stored, what: str, saved: set[str], ours: set[str]) -> None:
    sides = (("the model", saved - ours), ("the checkpoint", ours - saved))
    lack = [f"{who} lacks {what}{', '.join(map(shortened, sorted(names)[:5]))}" for who, names in sides if names]
    if lack:
        raise ArgumentError(f"{stored.folder}: {'; '.join(lack)}; is it of another model?")


def _other_values(stored: Stored, named: Named, whole: Whole) -> dict[str, Any]:
    """Returns what modules' ``set_extra_state`` will get; other entries that are not tensors must equal the model's."""
    other = dict(stored.state.other)
    tensors = [key for key in stored.tensors if key.startswith(MODEL) and is_extra_state(key)]
    names = {key.removeprefix(MODEL) for key in tensors}  # extra state that was a tensor when it was saved
    _refuse_differing(stored, "the extra state ", set(other) | names, set(whole.other))
    for key in tensors:  # only after the check: each is read whole
        if key.removeprefix(MODEL) in named.other:
            other[key.removeprefix(MODEL)] = _whole(stored, key)
    found = {}
    for name, value in other.items():
        if name not in named.other:  # of another rank's part of the model
            continue
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


def _whole(stored: Stored, key: str) -> Tensor:
    shape = stored.shape(key)
    values = stored.values(key, Piece(shape, Box.whole(shape), flat=False))
    tensor = torch.empty(shape, dtype=values.dtype, device="cpu")
    values.copy_to(tensor.view(-1))
    return tensor


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):  # the values hold tensors
        return False


def _model_values(stored: Stored, named: Named, whole: Whole) -> dict[str, Values]:
    """Returns this rank's part of the model's own tensors."""
    aliases = stored.state.aliases
    saved = {key.removeprefix(MODEL) for key in stored.tensors if key.startswith(MODEL) and not is_extra_state(key)}
    _refuse_differing(stored, "", saved | set(aliases), whole.names)
    for tied, name in named.aliases.items():
        one, other = (stored.digests(MODEL + aliases.get(either, either)) for either in (tied, name))
        if one != other:
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


def _optimizer_state(stored: Stored, optimizer: Optimizer, named: Named, whole: Whole) -> dict[str, Any]:
    """Returns the layout of ``torch.optim.Optimizer.load_state_dict``, with ``Values`` in place of tensors."""
    groups, theirs = stored.state.groups, [group["params"] for group in stored.state.groups]
    if list(map(set, theirs)) != list(map(set, whole.groups)):
        _refuse_groups(stored, theirs, whole.groups)
    positions = {name: i for i, name in enumerate(name for names in named.groups for name in names)}
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for index, (values, names) in enumerate(zip(groups, named.groups, strict=True)):
        try:
            check_saved_group(index, values)
        except (ArgumentError, TypeError) as error:
            raise ArgumentError(f"{stored.folder}: {shortened(str(error))}") from None
        if not isinstance(optimizer, AdamW):
            _refuse_amsgrad(stored, index, values, optimizer.param_groups[index])
        kept = {key: value for key, value in values.items() if key != "param_names"}  # of another part of the model
        result["param_groups"].append({**kept, "params": [positions[name] for name in names]})
    wanted = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ, "master": MASTER}
    ours = optimizer.parts.params if isinstance(optimizer, AdamW) else None
    if ours is None:
        del wanted["master"]
    for name, param in named.params.items():
        if EXP_AVG + name not in stored.tensors:
            continue
        entry: dict[str, Any] = {"step": stored.state.steps[name]}
        for key, prefix in wanted.items():
            if prefix + name in stored.tensors:
                holding = holding_of(name, param) if ours is None else ours.holding_of(param)
                entry[key] = _as_in_memory(stored.values(prefix + name, piece_of(param, holding)), holding)
        result["state"][positions[name]] = entry
    return result


def _refuse_amsgrad(stored: Stored, index: int, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises for amsgrad: torch would lack or drop max_exp_avg_sq at the next step."""
    for whose, group in (("the checkpoint's", saved), ("the optimizer's", ours)):
        if is_on(group.get("amsgrad")):
            raise ArgumentError(
                f"{stored.folder}: {whose} param group {index} has amsgrad=True, and the checkpoint has no "
                "max_exp_avg_sq; make the optimizer without amsgrad, or load the model alone (optimizer=None)"
            )


def _as_in_memory(values: Values, holding: Holding) -> Values:
    """Returns values in the parameter's order in memory; another order on disk needs a copy of one tensor."""
    if holding.order is None:
        return values

    def read() -> Iterator[tuple[int, Tensor]]:
        whole = torch.empty(values.shape, dtype=values.dtype, device="cpu")
        values.copy_to(whole.view(-1))
        yield from blocks_of(holding.part_of_whole(whole))

    return Values(values.shape, values.dtype, read)


def _refuse_groups(stored: Stored, theirs: Sequence[list[str]], ours: Sequence[list[str]]) -> None:
    if len(theirs) != len(ours):
        raise ArgumentError(f"{stored.folder}: {len(theirs)} param groups, the optimizer has {len(ours)}")
    for index, (saved, mine) in enumerate(zip(theirs, ours, strict=True)):
        sides = (("the checkpoint's", set(saved) - set(mine)), ("the optimizer's", set(mine) - set(saved)))
        only = [f"only {whose} has {', '.join(map(shortened, sorted(names)[:5]))}" for whose, names in sides if names]
        if only:
            raise ArgumentError(f"{stored.folder}: param group {index} differs: {'; '.join(only)}")


# ---- put into place ---------------------------------------------------------------------------------------------


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
    for (name, param), entry in zip(named.params.items(), _in_order(named, state), strict=True):
        for key, value in entry.items():
            if isinstance(value, Values):
                local = local_of(param)
                flat = torch.empty(local.numel(), dtype=value.dtype, device=local.device)
                value.copy_to(flat)
                entry[key] = like_parameter(param, holding_of(name, param), flat)
        if "step" in entry:
            entry["step"] = torch.tensor(float(entry["step"]), device="cpu")
    optimizer.load_state_dict(state)


def _in_order(named: Named, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [state["state"].get(position, {}) for position in range(len(named.params))]
