"""Reads and writes the safetensors format: eight bytes of length, a JSON header, the bytes of tensors."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superoffload.errors import ArgumentError
from superoffload.host.untrusted import is_count, is_shape, open_regular, parse_json, printable, shortened

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
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LONGEST_HEADER = 100 << 20
_ALIGN = 64
_RUN = 4 << 20  # bytes hashed and written at a time


@dataclass(frozen=True)
class Entry:
    """Describes a tensor; the order of entries determines its place in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """Writes a file with entries known in advance: each once, in any order, by one thread at a time."""

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
        """Writes the elements of one entry, given as consecutive flat tensors."""
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
        """Checks that every entry was written and syncs the file to the disk."""
        missing = self._places.keys() - self.digests.keys()
        if missing:
            raise ArgumentError(f"{self.path}: {sorted(missing)[:3]} were not written")
        os.truncate(self._file.fileno(), self.nbytes)
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Closes a file that is given up; ``finish()`` closes a complete one."""
        self._file.close()


def _write_at(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written


def flat_runs(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor as flat runs, so that conversions need little memory."""
    flat = tensor.detach().reshape(-1)
    for first in range(0, flat.numel(), _RUN // 4):
        yield flat[first : first + _RUN // 4]


class TensorReader:
    """Checks a file's header and reads tensors in blocks through one small buffer; every error names the file.

    ``digest``: SHA-256 that the header must have.
    """

    def __init__(self, path: Path, digest: str | None = None) -> None:
        self.path = path
        with self._reading() as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if self.nbytes < 8 or length > min(self.nbytes - 8, _LONGEST_HEADER):
                raise self._damaged("its header is longer than the file")
            file.seek(0)
            self.header = _read_exactly(file, 8 + length)
        if digest is not None and hashlib.sha256(self.header).hexdigest() != digest:
            raise ArgumentError(f"{path}: its header differs from its checksum; the file is damaged")
        self.entries = self._read_header()

    @contextmanager
    def _reading(self) -> Iterator[FileIO]:
        try:
            with open_regular(self.path, links=False) as file:
                yield file
        except OSError as error:
            raise ArgumentError(f"{self.path}: {error.strerror}; the checkpoint is not whole") from error
        except EOFError:
            raise self._damaged("it ends too early") from None

    def _damaged(self, what: str) -> ArgumentError:
        return ArgumentError(f"{self.path}: not a safetensors file, or damaged: {printable(shortened(what))}")

    def _read_header(self) -> dict[str, tuple[Entry, int]]:
        try:
            table = parse_json(self.header[8:])
            table.pop("__metadata__", None)
            entries = {}
            for name, one in table.items():
                shape, (begin, end) = one["shape"], one["data_offsets"]
                if not (is_shape(shape) and is_count(begin) and is_count(end)):
                    raise ValueError(f"numbers of {name}")
                entry = Entry(name, _DTYPES[one["dtype"]], tuple(shape))
                if end - begin != entry.nbytes:
                    raise ValueError(f"offsets of {name}")
                entries[name] = (entry, len(self.header) + begin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"its header cannot be read ({error})") from error
        end = len(self.header)
        for entry, at in sorted(entries.values(), key=lambda found: (found[1], found[0].nbytes)):
            if at != end:
                raise self._damaged(f"{entry.name} begins at {at}, expected {end}, where the one before it ends")
            end = at + entry.nbytes
        if end != self.nbytes:
            raise self._damaged(f"{self.nbytes} bytes, expected {end}")
        return entries

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise self._damaged(f"it has no {name}")
        return self.entries[name][0]

    def blocks(self, name: str, digest: str | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yields an entry's elements as flat blocks with their positions; each block overwrites the one before.

        ``digest``: SHA-256 that the bytes must have; otherwise raises ArgumentError after the last block.
        """
        entry, at = self.entry(name), self.entries[name][1]
        summed, done = hashlib.sha256(), 0
        buffer = torch.empty(min(_RUN, entry.nbytes), dtype=torch.uint8, device="cpu")
        bytes_of: Any = buffer.numpy()
        with self._reading() as file:
            file.seek(at)
            while done < entry.nbytes:
                size = min(_RUN, entry.nbytes - done)
                _fill(file, memoryview(bytes_of)[:size])
                if digest is not None:
                    summed.update(memoryview(bytes_of)[:size])
                block = buffer[:size]
                yield done // entry.dtype.itemsize, block != 0 if entry.dtype is torch.bool else block.view(entry.dtype)
                done += size
        if digest is not None and summed.hexdigest() != digest:
            what = printable(shortened(name))
            raise ArgumentError(f"{self.path}: {what} differs from its checksum in the manifest; the file is damaged")

    def tensor(self, name: str, digest: str | None = None) -> Tensor:
        """Returns a whole entry. ``digest``: see ``blocks``."""
        entry = self.entry(name)
        whole = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for at, block in self.blocks(name, digest):
            whole.view(-1)[at : at + len(block)].copy_(block)
        return whole


def _read_exactly(file: FileIO, count: int) -> bytes:
    data = bytearray(count)
    _fill(file, memoryview(data))
    return bytes(data)


def _fill(file: FileIO, view: memoryview) -> None:
    """Fills ``view``, as one read may return less than asked for; raises EOFError at the end of the file."""
    while len(view):
        count = file.readinto(view)
        if not count:
            raise EOFError
        view = view[count:]


def _known() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
