"""Identifies the code of a measurement by a digest of the files that it depends on, also without git."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("superoffload", "csrc", "setup.py")
_SUFFIXES = frozenset({".py", ".pyi", ".cpp", ".h", ".inl", ".cu", ".cuh", ".txt"})
_APART = ("csrc/tests/", "superoffload/tools/")  # in no result
_DIGITS = 16


def digest_of(parts: Iterable[str] = PACKAGE) -> str:
    """Digests the sources below ``parts``: folders and files of the checkout. A missing part counts as absent."""
    return _digest(tuple(parts), ROOT)


@cache
def _digest(parts: tuple[str, ...], root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(_files(parts, root)):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(contents)}\0".encode())
        digest.update(contents)
    return digest.hexdigest()[:_DIGITS]


def _files(parts: Sequence[str], root: Path) -> Iterator[Path]:
    for part in parts:
        folder = root / part
        if folder.is_file():
            yield folder
        for path in folder.rglob("*"):
            name = path.relative_to(root).as_posix()
            if path.suffix in _SUFFIXES and not name.startswith(_APART):
                yield path
