"""Loading: everything is read and checked before anything changes, on any rank."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
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
    check_optimizer,
    holding_of,
    name_everything,
    on_all_ranks,
)
from superoffload.checkpoints.folder import check_file, read_manifest
from superoffload.checkpoints.safetensors import TensorReader
from superoffload.checkpoints.saving import STATE
from superoffload.errors import ArgumentError
from superoffload.ranks.layout import Chunk, Holding, like_parameter, local_of


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Loads what ``save`` wrote, by any number of ranks, into ``model`` and ``optimizer``; returns its ``extra``.

    Only tensors in the safetensors format and what ``torch.load(weights_only=True)`` takes is read, and all of it is
    compared with the manifest's checksums. ArgumentError names the file or the parameter that does not fit; then
    nothing was changed, on any rank. ``optimizer`` None: the weights alone.
    """
    if folder is None:
        raise ArgumentError("folder=None: expected a checkpoint's folder; latest() gives None where there is none yet")
    if optimizer is not None:
        check_optimizer(optimizer)
    named = name_everything(model, optimizer)
    session = named.session

    def read() -> tuple[_Stored, dict[str, Tensor], dict[str, Any] | None]:
        stored = _Stored(Path(folder))
        values = _model_values(stored, named)
        return stored, values, None if optimizer is None else _optimizer_state(stored, optimizer, named)

    stored, values, state = on_all_ranks(session, "load()", read)
    if optimizer is not None and state is not None:
        optimizer.load_state_dict(state)
    with torch.no_grad():
        for name, value in values.items():
            local_of(named.tensors[name]).copy_(value)
            torch.autograd.graph.increment_version(named.tensors[name])
    if stored.state["other"]:
        _load_other(model, stored.state["other"])
    extra: dict[str, Any] = stored.state["extra"]
    return extra


class _Stored:
    """A checkpoint's content, checked as far as it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = read_manifest(folder)
        self._files: Mapping[str, Any] = manifest["files"]
        self.tensors: Mapping[str, list[dict[str, Any]]] = manifest["tensors"]
        self._open: dict[str, TensorReader] = {}
        for name, expected in self._files.items():
            data = check_file(folder, name, expected)
            if name == STATE:
                self.state = self._read_state(folder / name, data)
        if not hasattr(self, "state"):
            raise ArgumentError(f"{folder}: the manifest has no {STATE}")

    def _read_state(self, path: Path, data: bytes | None) -> dict[str, Any]:
        try:
            content: dict[str, Any] = torch.load(io.BytesIO(data or b""), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            raise ArgumentError(f"{path}: cannot be read safely ({str(error).splitlines()[0]})") from error
        return content

    def part(self, key: str, tensor: Tensor, holding: Holding) -> Tensor:
        """This rank's elements of an entry, flat, put together from the pieces that hold any of them."""
        pieces = self.tensors[key]
        shape = tuple(pieces[0]["shape"])
        if shape != tuple(tensor.shape):
            raise ArgumentError(
                f"{self.folder}: {key} has shape {shape}, expected {tuple(tensor.shape)}; is it of another model?"
            )
        own = holding.own
        same = [p for p in pieces if (p["dim"], p["start"], p["length"]) == (own.dim, own.start, own.length)]
        if same and all(p["flat"] == holding.flat_chunks for p in same):
            return self._piece(key, same[0]).reshape(-1)
        return holding.part_of_whole(self._whole(key, shape, pieces))

    def whole(self, key: str) -> Tensor:
        pieces = self.tensors[key]
        return self._whole(key, tuple(pieces[0]["shape"]), pieces)

    def _whole(self, key: str, shape: tuple[int, ...], pieces: list[dict[str, Any]]) -> Tensor:
        values = [self._piece(key, piece) for piece in pieces]
        if len(values) == 1 and values[0].numel() == torch.Size(shape).numel():
            return values[0].view(shape)
        whole, covered = torch.empty(shape, dtype=values[0].dtype), 0
        for piece, value in zip(pieces, values, strict=True):
            where = whole.view(-1) if piece["flat"] else whole
            chunk = Chunk(0, piece["dim"], piece["start"], piece["length"])
            chunk.of(where).copy_(value)
            covered += value.numel()
        if covered != whole.numel():
            raise ArgumentError(f"{self.folder}: {key} has {covered} elements, expected {whole.numel()}")
        return whole

    def _piece(self, key: str, piece: Mapping[str, Any]) -> Tensor:
        name = piece["file"]
        if name not in self._open:
            reader = TensorReader(self.folder / name)
            if hashlib.sha256(reader.header).hexdigest() != self._files[name]["header"]:
                raise ArgumentError(f"{reader.path}: its header differs from its checksum; the file is damaged")
            self._open[name] = reader
        return self._open[name].tensor(key, piece["sha256"])


def _model_values(stored: _Stored, named: Named) -> dict[str, Tensor]:
    """The model's own tensors in their shapes, on this rank."""
    saved = {key.removeprefix(MODEL) for key in stored.tensors if key.startswith(MODEL)}
    saved |= set(stored.state["aliases"])
    ours = set(named.tensors) | set(named.aliases)
    for what, names in (("the model lacks", saved - ours), ("the checkpoint lacks", ours - saved)):
        if names:
            raise ArgumentError(f"{stored.folder}: {what} {', '.join(sorted(names)[:5])}; is it of another model?")
    values = {}
    for name, tensor in named.tensors.items():
        key = MODEL + str(stored.state["aliases"].get(name, name))
        part = stored.part(key, tensor, holding_of(name, tensor))
        if part.dtype != tensor.dtype:
            raise ArgumentError(f"{stored.folder}: {name} is {part.dtype}, expected {tensor.dtype}; convert the model")
        values[name] = part.view(local_of(tensor).shape)
    return values


def _optimizer_state(stored: _Stored, optimizer: Optimizer, named: Named) -> dict[str, Any]:
    """In the layout of ``torch.optim.Optimizer.load_state_dict``."""
    groups: list[dict[str, Any]] = stored.state["groups"]
    theirs = [group["params"] for group in groups]
    if theirs != named.groups:
        for g, (saved, ours) in enumerate(zip(theirs, named.groups, strict=False)):
            different = sorted(set(saved) ^ set(ours)) or ["their order"]
            if saved != ours:
                raise ArgumentError(f"{stored.folder}: param group {g} differs: {', '.join(different[:5])}")
        raise ArgumentError(f"{stored.folder}: {len(theirs)} param groups, the optimizer has {len(named.groups)}")
    positions = {name: i for i, name in enumerate(name for names in named.groups for name in names)}
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for values, names in zip(groups, named.groups, strict=True):
        result["param_groups"].append({**values, "params": [positions[name] for name in names]})
    for name, param in named.params.items():
        if EXP_AVG + name not in stored.tensors:
            continue
        entry: dict[str, Any] = {"step": torch.tensor(float(stored.state["steps"][name]))}
        for key, prefix in (("exp_avg", EXP_AVG), ("exp_avg_sq", EXP_AVG_SQ), ("master", MASTER)):
            if prefix + name in stored.tensors and (key != "master" or isinstance(optimizer, AdamW)):
                entry[key] = _value(stored, prefix + name, name, param)
        result["state"][positions[name]] = entry
    return result


def _value(stored: _Stored, key: str, name: str, param: Tensor) -> Tensor:
    """Whole for plain parameters, which are cut by whoever loads them; a DTensor for a DTensor."""
    holding = holding_of(name, param)
    return like_parameter(param, holding, stored.part(key, param, holding))


def _load_other(model: nn.Module, other: Mapping[str, Any]) -> None:
    """Values of ``get_extra_state``, to the modules that have them."""
    suffix = "_extra_state"
    for name, value in other.items():
        module = model.get_submodule(name.removesuffix(suffix).removesuffix("."))
        module.set_extra_state(value)
