"""The safetensors format: eight bytes of length, a JSON header, and the bytes of tensors. Written in any order."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superoffload.errors import ArgumentError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LONGEST_HEADER = 100 << 20
_ALIGN = 64
_RUN = 4 << 20  # bytes hashed and written at a time


@dataclass(frozen=True)
class Entry:
    """A tensor to come: its place in the file follows from the order of entries."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """Writes a file whose entries are known beforehand; each once, in any order, from any one thread."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.digests: dict[str, str] = {}
        self._places: dict[str, tuple[Entry, int]] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        at = 0
        for entry in entries:
            if entry.dtype not in _NAMES:
                raise ArgumentError(f"{entry.name}: dtype {entry.dtype} cannot be saved; expected {_known()}")
            where = {"shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]}
            header[entry.name] = {"dtype": _NAMES[entry.dtype], **where}
            self._places[entry.name] = (entry, at)
            at += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + at
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by finish()
        try:
            _write_at(self._file.fileno(), self.header, 0)
        except OSError:
            self._file.close()
            raise

    def write(self, name: str, runs: Iterable[Tensor]) -> None:
        """The elements of one entry, as flat tensors on the CPU, one after the other."""
        entry, start = self._places[name]
        at, digest = start + len(self.header), hashlib.sha256()
        for run in runs:
            array: Any = run.to("cpu", entry.dtype).contiguous().view(torch.uint8).numpy()
            data = memoryview(array)
            for first in range(0, len(data), _RUN):
                part = data[first : first + _RUN]
                digest.update(part)
                _write_at(self._file.fileno(), part, at)
                at += len(part)
        if at != start + len(self.header) + entry.nbytes:
            raise ArgumentError(f"{name}: {at - start - len(self.header)} bytes, expected {entry.nbytes}")
        self.digests[name] = digest.hexdigest()

    def finish(self) -> None:
        """On the disk when it returns."""
        missing = self._places.keys() - self.digests.keys()
        if missing:
            raise ArgumentError(f"{self.path}: {sorted(missing)[:3]} were not written")
        os.truncate(self._file.fileno(), self.nbytes)
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Without ``finish()``: of a file that is given up."""
        self._file.close()


def _write_at(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written


def flat_runs(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as flat runs, so that conversions need little memory."""
    flat = tensor.detach().reshape(-1)
    for first in range(0, flat.numel(), _RUN // 4):
        yield flat[first : first + _RUN // 4]


class TensorReader:
    """An open file. Every error names it; tensors share the file's pages until they are written to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.nbytes = os.fstat(file.fileno()).st_size
                self._map: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.nbytes else b""
        except OSError as error:
            raise ArgumentError(f"{path}: {error.strerror}; the checkpoint is not whole") from error
        length = int.from_bytes(self._map[:8], "little")
        if self.nbytes < 8 or length > min(self.nbytes - 8, _LONGEST_HEADER):
            raise self._damaged("its header is longer than the file")
        self.header = bytes(self._map[: 8 + length])
        self.metadata: dict[str, str] = {}
        self.entries = self._read_header()

    def _damaged(self, what: str) -> ArgumentError:
        return ArgumentError(f"{self.path}: not a safetensors file, or damaged: {what}")

    def _read_header(self) -> dict[str, tuple[Entry, int]]:
        try:
            table = json.loads(self.header[8:])
            self.metadata = table.pop("__metadata__", {})
            entries = {}
            for name, one in table.items():
                entry = Entry(name, _DTYPES[one["dtype"]], tuple(int(size) for size in one["shape"]))
                begin, end = one["data_offsets"]
                if begin < 0 or end - begin != entry.nbytes or min(entry.shape, default=0) < 0:
                    raise ValueError(f"offsets of {name}")
                entries[name] = (entry, len(self.header) + int(begin))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"its header cannot be read ({error})") from error
        end = max((at + entry.nbytes for entry, at in entries.values()), default=len(self.header))
        if end != self.nbytes:
            raise self._damaged(f"{self.nbytes} bytes, expected {end}")
        return entries

    def tensor(self, name: str, digest: str | None = None) -> Tensor:
        """``digest``: SHA-256 that its bytes must have."""
        if name not in self.entries:
            raise self._damaged(f"it has no {name}")
        entry, at = self.entries[name]
        if digest is not None and hashlib.sha256(memoryview(self._map)[at : at + entry.nbytes]).hexdigest() != digest:
            raise ArgumentError(f"{self.path}: {name} differs from its checksum in the manifest; the file is damaged")
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = entry.nbytes // entry.dtype.itemsize
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=at).view(entry.shape)


def _known() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
