"""Reads a checkpoint on disk: its manifest, its state and its tensors, each compared with its checksum."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superoffload.checkpoints.contents import EXP_AVG, EXP_AVG_SQ, MASTER, MODEL
from superoffload.checkpoints.folder import STATE, check_size, read_manifest
from superoffload.checkpoints.tensor_files import Piece, bytes_of, copy_shared, may_share
from superoffload.errors import ArgumentError
from superoffload.host.text import shortened
from superoffload.optimizer.state_dict import Values, blocks_of

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
