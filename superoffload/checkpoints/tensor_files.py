"""Files of tensors in the safetensors format, written run by run, and cut and joined anew for other ranks.

A file is written by our own code, since the safetensors package takes all tensors of a file at once; it is read with
that package, which maps it into memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superoffload.distributed.ownership import Box
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
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_LONGEST_HEADER = 100_000_000  # bytes; the safetensors package refuses more
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
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
                raise ArgumentError(f"{entry.name}: dtype {entry.dtype} cannot be saved; expected {known}")
            where = {"shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes]}
            header[entry.name] = {"dtype": _NAMES[entry.dtype], **where}
            self._places[entry.name] = (entry, at)
            at += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        if len(text) > _LONGEST_HEADER:
            raise ArgumentError(
                f"model: {len(entries)} tensors whose names take {len(text)} bytes, expected at most 1e8"
            )
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + at
        self._file = FileIO(path, "x")  # finish() or close() closes it
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
            data = bytes_of(run.to("cpu", entry.dtype).contiguous())
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


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a contiguous CPU tensor's bytes, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


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


# ---- cut anew ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Locates a part of a tensor of ``shape``: a box of it, or, if it is ``flat``, of the flat tensor."""

    shape: tuple[int, ...]
    box: Box
    flat: bool

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Piece:
        box = Box(tuple(content["offsets"]), tuple(content["lengths"]))
        return cls(tuple(content["shape"]), box, content["flat"])

    def as_json(self) -> dict[str, Any]:
        box = {"offsets": list(self.box.offsets), "lengths": list(self.box.lengths)}
        return {"shape": list(self.shape), **box, "flat": self.flat}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the shape that the box is cut from."""
        return (math.prod(self.shape),) if self.flat else self.shape

    def boxes(self) -> list[Box]:
        """Returns the boxes of the tensor that the piece consists of, in the order of its elements."""
        if not self.flat:
            return [self.box]
        (begin,), (length,) = self.box.offsets, self.box.lengths
        return list(_boxes_of_run(self.shape, begin, begin + length))

    def views(self, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yields the piece's boxes with their elements, as views of ``values``, the elements of the piece."""
        at = 0
        for box in self.boxes():
            yield box, values.reshape(-1)[at : at + box.numel].view(box.lengths)
            at += box.numel


def _boxes_of_run(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Yields the boxes of which elements ``begin`` to ``end`` of a flat tensor of ``shape`` consist: a part of a row,
    whole rows, and a part of a row, where each part is cut in the same way."""
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # inside of one row
        yield from (_in_row(box, last) for box in _boxes_of_run(shape[1:], begin - last * row, end - last * row))
        return
    yield from (_in_row(box, first - 1) for box in _boxes_of_run(shape[1:], begin - (first - 1) * row, row))
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from (_in_row(box, last) for box in _boxes_of_run(shape[1:], 0, end - last * row))


def _in_row(box: Box, row: int) -> Box:
    return Box((row, *box.offsets), (1, *box.lengths))


def copy_shared(piece: Piece, values: Tensor, target: Piece, into: Tensor) -> None:
    """Copies the elements that two pieces of a tensor share from ``values`` to ``into``, a contiguous tensor."""
    places = list(target.views(into))
    for box, there in piece.views(values):
        for other, place in places:
            common = _overlap(box, other)
            if common is not None:
                place[_slices(common, other)].copy_(there[_slices(common, box)])


def may_share(piece: Piece, other: Piece) -> bool:
    """Tells whether two pieces of a tensor have an element in common."""
    return any(_overlap(box, its) is not None for box in piece.boxes() for its in other.boxes())


def _overlap(box: Box, other: Box) -> Box | None:
    starts = tuple(map(max, box.offsets, other.offsets))
    ends = map(lambda a, m, b, n: min(a + m, b + n), box.offsets, box.lengths, other.offsets, other.lengths)
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    found = zip(box.offsets, box.lengths, outer.offsets, strict=True)
    return tuple(slice(offset - start, offset - start + length) for offset, length, start in found)
