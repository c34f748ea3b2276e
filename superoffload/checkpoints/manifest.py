"""Checks the names, types, ranges and coverage in a manifest; no other module does."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from superoffload.distributed.boxes import Box, misfit
from superoffload.errors import ArgumentError
from superoffload.host.untrusted import is_count, is_shape, printable, shortened, shown

VERSION = 2  # the first one described boxes that cut one dimension only
STATE = "state.pt"
LARGEST_STATE = 1 << 30  # bytes; all of them are held in memory
LONGEST_KEY = 4096  # characters of a tensor's name with its prefix
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENSORS = re.compile(r"rank-[0-9]{5,9}\.safetensors")


def check_content(where: str, content: Mapping[str, Any]) -> None:
    """Raises ArgumentError, with ``where`` and what is wrong, for a manifest whose parts do not fit together. Adds to
    pieces of the first version what the present one has."""
    files, tensors = content.get("files"), content.get("tensors")
    try:
        _expect(isinstance(files, dict) and isinstance(tensors, dict), "files and tensors", (files, tensors))
        assert isinstance(files, dict) and isinstance(tensors, dict)
        for name, one in files.items():
            _check_file(name, one)
        _expect(STATE in files, f"a file {STATE}", files)
        for key, pieces in tensors.items():
            _expect(len(key) <= LONGEST_KEY, f"a name of at most {LONGEST_KEY} characters", key)
            try:
                _check_pieces(pieces, files, content.get("version", VERSION))
            except _Unexpected as error:  # formats the name only on failure
                raise _Unexpected(f"{printable(shortened(key))}: {error}") from None
    except _Unexpected as error:
        raise ArgumentError(f"{where}: {error}; the manifest is damaged, or not of superoffload") from None


class _Unexpected(Exception):
    """Says what was expected and what was found."""


def _expect(holds: bool, what: str, found: Any) -> None:
    if not holds:
        raise _Unexpected(f"expected {what}, found {shown(found)}")


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _check_file(name: str, one: Any) -> None:
    known = name == STATE or _TENSORS.fullmatch(name) is not None
    _expect(known, f"only files {STATE} and rank-NUMBER.safetensors", name)
    _expect(isinstance(one, dict) and is_count(one.get("bytes")), f"a number of bytes of {name}", one)
    if name == STATE:
        _expect(_is_digest(one.get("sha256")), f"a SHA-256 of {name}", one)
        _expect(one["bytes"] <= LARGEST_STATE, f"at most {LARGEST_STATE} bytes of {name}", one["bytes"])
    else:
        _expect(_is_digest(one.get("header")), f"a SHA-256 of the header of {name}", one)


def _check_pieces(pieces: Any, files: Mapping[str, Any], version: int) -> None:
    _expect(isinstance(pieces, list) and len(pieces) > 0, "a list of pieces", pieces)
    for piece in pieces:
        _check_piece(piece, files, version)
    _check_coverage(pieces)


def _check_piece(piece: Any, files: Mapping[str, Any], version: int) -> None:
    _expect(isinstance(piece, dict), "a piece", piece)
    shape, flat, file = piece.get("shape"), piece.get("flat"), piece.get("file")
    _expect(is_shape(shape), "a shape", shape)
    _expect(isinstance(flat, bool), "whether flat", flat)
    if version == 1:
        _add_box(piece)
    offsets, lengths, sizes = piece.get("offsets"), piece.get("lengths"), sizes_of(piece)
    for numbers in (offsets, lengths):
        known = isinstance(numbers, list) and len(numbers) == len(sizes) and all(map(is_count, numbers))
        _expect(known, f"{len(sizes)} offsets and lengths", numbers)
    within = all(offset + length <= size for offset, length, size in zip(offsets, lengths, sizes, strict=True))
    _expect(within, "offsets and lengths within the shape", (offsets, lengths))
    _expect(isinstance(file, str) and file != STATE and file in files, "a file of tensors in the manifest", file)
    _expect(_is_digest(piece.get("sha256")), "a SHA-256", piece.get("sha256"))


def _add_box(piece: dict[str, Any]) -> None:
    """Adds the box of a piece of the first version, which named one dimension, a start and a length."""
    numbers: list[Any] = [piece.get("dim"), piece.get("start"), piece.get("length")]
    _expect(all(map(is_count, numbers)), "dim, start and length", numbers)
    dim, start, length = numbers
    sizes = sizes_of(piece)
    _expect(dim < max(1, len(sizes)), "a dim of the shape", dim)
    _expect(len(sizes) > 0 or start + length <= 1, "start and length within the shape", numbers)
    piece["offsets"] = [start if d == dim else 0 for d in range(len(sizes))]
    piece["lengths"] = [length if d == dim else size for d, size in enumerate(sizes)]


def sizes_of(piece: Mapping[str, Any]) -> list[int]:
    """Returns the shape that a piece's box is cut from."""
    return [math.prod(piece["shape"])] if piece["flat"] else piece["shape"]


def _check_coverage(pieces: Sequence[Mapping[str, Any]]) -> None:
    """Checks that pieces, cut alike and each in its own file, cover every element once, so none is read many times."""
    kinds = {(tuple(piece["shape"]), piece["flat"]) for piece in pieces}
    _expect(len(kinds) == 1, "pieces of one shape, cut in one way", kinds)
    _expect(len({piece["file"] for piece in pieces}) == len(pieces), "pieces in different files", pieces)
    found = misfit(sizes_of(pieces[0]), (Box(tuple(one["offsets"]), tuple(one["lengths"])) for one in pieces))
    _expect(found is None, "pieces that cover all of it once", found and found.what)
