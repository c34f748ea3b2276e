"""Reads a checkpoint on disk: its manifest, its state and its tensors, each checked as it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superoffload.checkpoints.archive import read_archive
from superoffload.checkpoints.contents import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL, Piece
from superoffload.checkpoints.cuts import Cut, cut_of, shared
from superoffload.checkpoints.folder import check_file, read_manifest
from superoffload.checkpoints.manifest import LARGEST_STATE, STATE
from superoffload.checkpoints.safetensors import TensorReader
from superoffload.distributed.boxes import Box
from superoffload.distributed.ownership import Holding
from superoffload.errors import ArgumentError
from superoffload.host.untrusted import nested_deeply, printable, shortened, shown
from superoffload.optimizer.state_dict import Values

_MOST_STEPS = 1 << 53  # the largest count that float64 holds exactly


@dataclass(frozen=True)
class StoredState:
    """Holds the contents of ``state.pt``. ``groups`` list parameters by name."""

    groups: list[dict[str, Any]]
    steps: dict[str, int]
    other: dict[str, Any]
    aliases: dict[str, str]
    extra: dict[str, Any]


@dataclass
class Stored:
    """Opens a checkpoint's folder and reads its tensors. ``tensors``: the pieces of each entry."""

    folder: Path
    tensors: Mapping[str, Sequence[Mapping[str, Any]]] = field(init=False)
    state: StoredState = field(init=False)

    def __post_init__(self) -> None:
        manifest = read_manifest(self.folder)
        self.tensors = manifest["tensors"]
        self._headers = {name: one.get("header") for name, one in manifest["files"].items()}
        self._readers: dict[str, TensorReader] = {}
        for name, expected in manifest["files"].items():
            data = check_file(self.folder, name, expected)
            if name == STATE:
                self.state = self._read_state(data or b"")

    def _read_state(self, data: bytes) -> StoredState:
        path = self.folder / STATE
        try:
            content = read_archive(data)
        except Exception as error:  # of any kind: the unpickler assumes intact input
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise ArgumentError(f"{path}: cannot be read safely ({printable(shortened(first))})") from error
        problem = self._problem_of(content)
        if problem is not None:
            raise ArgumentError(f"{path}: {printable(shortened(problem))}; it is damaged, or not of superoffload")
        return StoredState(**{name: content[name] for name in StoredState.__dataclass_fields__})

    def _problem_of(self, content: Any) -> str | None:
        kinds = {"groups": list, "steps": dict, "other": dict, "aliases": dict, "extra": dict}
        for name, kind in kinds.items():
            if not isinstance(content, dict) or not isinstance(content.get(name), kind):
                return f"expected a {kind.__name__} under {name!r}"
        for group in content["groups"]:
            names = group.get("params") if isinstance(group, dict) else None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                return "expected param groups with names of parameters"
            betas = group.get("betas")
            if isinstance(betas, (list, tuple)) and len(betas) != 2:
                return "expected two betas"
            numbers = [group.get(name) for name in ("lr", "eps", "weight_decay")]
            numbers += betas if isinstance(betas, (list, tuple)) else [betas]
            if not all(one is None or isinstance(one, (int, float, str, Tensor)) for one in numbers):
                return "expected numbers for lr, betas, eps and weight_decay"  # a list may contain itself
            if nested_deeply(group):
                return "expected param groups without deeply nested values"
        steps = content["steps"].values()
        if not all(type(count) is int and 0 <= count <= _MOST_STEPS for count in steps):
            return "expected numbers of steps"
        stepped, masters = set(content["steps"]), self._named(MASTER)
        if not stepped == self._named(EXP_AVG) == self._named(EXP_AVG_SQ) or masters not in (set(), stepped):
            return "expected exp_avg, exp_avg_sq, a number of steps and, of all or none, masters of the same parameters"
        if not all(isinstance(name, str) for part in ("other", "aliases") for name in content[part]):
            return "expected names of what is in the model's state_dict"
        if not all(isinstance(name, str) and MODEL + name in self.tensors for name in content["aliases"].values()):
            return "expected tied names of tensors in the checkpoint"
        return None

    def _named(self, prefix: str) -> set[str]:
        return {key.removeprefix(prefix) for key in self.tensors if key.startswith(prefix)}

    def values(self, key: str, tensor: Tensor, holding: Holding) -> Values:
        """Returns the part of an entry that ``holding`` names; reading it verifies the checksums."""
        shape = tuple(self.tensors[key][0]["shape"])
        if shape != tuple(tensor.shape):
            raise ArgumentError(
                f"{self.folder}: {key} has shape {shape}, expected {tuple(tensor.shape)}; is it of another model?"
            )
        return self._values(key, cut_of(holding.shape, holding.box))

    def whole(self, key: str) -> Tensor:
        shape = tuple(self.tensors[key][0]["shape"])
        values = self._values(key, cut_of(shape, Box.whole(shape)))
        nbytes = math.prod(shape) * values.dtype.itemsize
        if nbytes > LARGEST_STATE:
            raise self._misfits(key, f"{nbytes} bytes of extra state, expected at most {LARGEST_STATE}")
        try:
            tensor = torch.empty(shape, dtype=values.dtype, device="cpu")
            values.copy_to(tensor.view(-1))
        except (RuntimeError, MemoryError) as error:
            raise self._misfits(key, f"{nbytes} bytes cannot be held in memory ({error})") from error
        return tensor

    def _misfits(self, key: str, what: str) -> ArgumentError:
        return ArgumentError(f"{self.folder}: {printable(shortened(key))}: {shortened(what)}")

    def _values(self, key: str, own: Cut) -> Values:
        pieces, dtypes = self.tensors[key], set()
        needed: list[tuple[TensorReader, str, Cut]] = []
        for index, one in enumerate(pieces):
            piece = Piece.of_json(one)
            cut = piece.cut
            wanted = cut.may_share(own)
            if index and not wanted:  # the first piece tells the dtype
                continue
            reader = self._reader(one["file"])
            entry = reader.entry(key)
            if entry.shape != piece.box.lengths:
                raise ArgumentError(
                    f"{reader.path}: {shown(key)} has shape {entry.shape}, the manifest says {piece.box.lengths}"
                )
            dtypes.add(entry.dtype)
            if wanted:
                needed.append((reader, one["sha256"], cut))
        if len(dtypes) > 1:
            raise ArgumentError(f"{self.folder}: {shown(key)} has pieces of {', '.join(sorted(map(str, dtypes)))}")
        return Values(tuple(pieces[0]["shape"]), dtypes.pop(), partial(_read, key, needed, own))

    def _reader(self, name: str) -> TensorReader:
        if name not in self._readers:
            self._readers[name] = TensorReader(self.folder / name, self._headers[name])
        return self._readers[name]


def _read(key: str, pieces: Sequence[tuple[TensorReader, str, Cut]], own: Cut) -> Iterator[tuple[int, Tensor]]:
    for reader, digest, cut in pieces:
        for at, block in reader.blocks(key, digest):
            for begin, there, count in shared(cut, own, at, at + len(block)):
                yield there, block[begin - at : begin - at + count]
