"""Files of tensors in the safetensors format, written run by run, and put together anew for other ranks.

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


class TensorFile:
    """Writes ``entries`` (dtype and shape by name) to a new file: each once, in any order, by one thread at a time.

    ``with`` opens the file. At its end every entry must be there, and the file is synced to the disk.
    """

    def __init__(
        self, path: Path, entries: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
    ) -> None:
        self.path = path
        self.digests: dict[str, str] = {}
        self._places: dict[str, tuple[torch.dtype, int, int]] = {}  # with first and last byte
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        at = 0
        for name, (dtype, shape) in entries.items():
            if dtype not in _NAMES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
                raise ArgumentError(f"{name}: dtype {dtype} cannot be saved; expected {known}")
            end = at + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            self._places[name] = (dtype, at, end)
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGN)
        if len(text) > _LONGEST_HEADER:
            raise ArgumentError(
                f"model: {len(entries)} tensors whose names take {len(text)} bytes, expected at most 1e8"
            )
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self.header) + at

    def __enter__(self) -> TensorFile:
        self._file = FileIO(self.path, "x")
        return self

    def write(self, name: str, runs: Iterable[Tensor]) -> None:
        """Writes the elements of one entry, given as consecutive flat tensors of any dtype."""
        dtype, at, end = self._places[name]
        digest = hashlib.sha256()
        for run in runs:
            data = bytes_of(run.to("cpu", dtype).contiguous())
            for first in range(0, len(data), _RUN):
                part = data[first : first + _RUN]
                digest.update(part)
                self._write_at(part, len(self.header) + at)
                at += len(part)
        if at != end:
            raise ArgumentError(f"{name}: {end - at} bytes are missing")
        self.digests[name] = digest.hexdigest()

    def _write_at(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self._file.fileno(), view, at)
            view, at = view[written:], at + written

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if failed is None:
                missing = self._places.keys() - self.digests.keys()
                if missing:
                    raise ArgumentError(f"{self.path}: {sorted(missing)[:3]} were not written")
                self._write_at(self.header, 0)
                os.fsync(self._file.fileno())


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a contiguous CPU tensor's bytes, without a copy."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def flat_runs(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor as flat runs, so that conversions need little memory."""
    flat = tensor.detach().reshape(-1)
    for first in range(0, flat.numel(), _RUN // 4):
        yield flat[first : first + _RUN // 4]


# ---- put together anew ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredPart:
    """Locates a part of a tensor of ``shape``: a box of it, or, if it is ``flat``, of the flat tensor."""

    shape: tuple[int, ...]
    box: Box
    flat: bool

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> StoredPart:
        """Returns the piece that a manifest describes; raises an error of any kind for what is none."""
        shape, offsets, lengths = (tuple(content[key]) for key in ("shape", "offsets", "lengths"))
        piece = cls(shape, Box(offsets, lengths), content["flat"])
        if type(piece.flat) is not bool or not all(type(n) is int and n >= 0 for n in (*shape, *offsets, *lengths)):
            raise ValueError("expected shapes, offsets and lengths")
        if not len(offsets) == len(lengths) == len(piece.sizes):
            raise ValueError("expected an offset and a length of each dimension")
        return piece

    def as_json(self) -> dict[str, Any]:
        box = {"offsets": list(self.box.offsets), "lengths": list(self.box.lengths)}
        return {"shape": list(self.shape), **box, "flat": self.flat}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the shape that the box is cut from."""
        return (math.prod(self.shape),) if self.flat else self.shape

    @property
    def span(self) -> range:
        """Returns the indices in the flat tensor from the first to the last element."""
        last = Box(tuple(map(lambda o, n: o + n - 1, self.box.offsets, self.box.lengths)), self.box.lengths)
        return range(self.box.first_in(self.sizes), last.first_in(self.sizes) + 1)

    def may_share(self, other: StoredPart) -> bool:
        """Tells whether two pieces of a tensor have an element in common; of pieces that are cut in different ways,
        whether they may have."""
        if self.flat == other.flat:
            return _overlap(self.box, other.box) is not None
        one, two = self.span, other.span
        return bool(self.box.numel and other.box.numel and range(max(one[0], two[0]), min(one[-1], two[-1]) + 1))


def put_together(own: StoredPart, found: Sequence[tuple[StoredPart, Tensor]], dtype: torch.dtype) -> Tensor:
    """Returns the elements of ``own`` from the pieces that share some with it: a view where one piece is enough."""
    if len(found) == 1:
        piece, values = found[0]
        if piece == own:
            return values
        if piece.box == Box.whole(piece.sizes):
            return own.box.of(values.reshape(own.sizes))
    target = own
    if any(piece.flat != own.flat for piece, _ in found):
        target = StoredPart(own.shape, Box.whole((math.prod(own.shape),) if not own.flat else own.shape), not own.flat)
    joined = torch.empty(target.box.lengths, dtype=dtype, device="cpu")  # what is not written takes no memory
    for piece, values in found:
        common = _overlap(piece.box, target.box)
        if common is not None:
            joined[_slices(common, target.box)].copy_(values[_slices(common, piece.box)])
    return joined if target is own else own.box.of(joined.view(own.sizes))


def _overlap(box: Box, other: Box) -> Box | None:
    starts = tuple(map(max, box.offsets, other.offsets))
    ends = map(lambda a, m, b, n: min(a + m, b + n), box.offsets, box.lengths, other.offsets, other.lengths)
    lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, lengths) if all(length > 0 for length in lengths) else None


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    found = zip(box.offsets, box.lengths, outer.offsets, strict=True)
    return tuple(slice(offset - start, offset - start + length) for offset, length, start in found)
