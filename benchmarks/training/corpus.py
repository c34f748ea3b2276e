"""Reads text to train on, and cuts batches from it: the Python standard library's sources, or the user's files.

One token is one byte, so any text works without a vocabulary. Every Python installation has the default corpus.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superoffload.errors import ArgumentError

DEFAULT_LIMIT = 8 << 20  # bytes; a default run reads each at most once, so more would only cost memory

# Skipped folders of the standard library: tests are mostly tables, the rest does not belong to the library.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

_TEXTS = (".md", ".py", ".rst", ".txt")  # of a folder

# The text is cut into this many equal pieces and every PIECE_STRIDE-th is held out, so that the held-out text is spread
# over all of the corpus.
_PIECES = 100
_PIECE_STRIDE = 20


@dataclass(frozen=True)
class Corpus:
    """Holds training and held-out bytes (uint8), and their source."""

    train: Tensor
    held_out: Tensor
    source: str
    sha256: str

    def describe(self) -> dict[str, str | int]:
        """Returns what a summary needs to identify the same text."""
        sizes = {"train_bytes": self.train.numel(), "held_out_bytes": self.held_out.numel()}
        return {"source": self.source, **sizes, "sha256": self.sha256}


def load_corpus(paths: Sequence[str] | None, sequence: int, limit: int = DEFAULT_LIMIT) -> Corpus:
    """Reads the first `limit` bytes of the text in these files and folders; `sequence` sets the least size."""
    files = [file for path in paths for file in _user_files(Path(path))] if paths else _standard_library_files()
    text = b""
    for file in files:
        try:
            with file.open("rb") as opened:
                text += opened.read(limit - len(text))
        except OSError as error:
            raise ArgumentError(f"data={file}: cannot be read ({error.strerror}); fix it or leave it out") from error
        if len(text) == limit:
            break
    source = ", ".join(paths) if paths else "Python standard library sources"
    return Corpus(*_split(text, sequence, source), source, hashlib.sha256(text).hexdigest())


def _standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _SKIPPED_FOLDERS]  # not walked: they may be huge
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    # By the path relative to the root, so that two machines with the same Python agree on the order.
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _user_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in _TEXTS and file.is_file())
    if not files:
        raise ArgumentError(f"data={path}: expected a file, or a folder with files that end in {', '.join(_TEXTS)}")
    return files


def _split(text: bytes, sequence: int, source: str) -> tuple[Tensor, Tensor]:
    piece = len(text) // _PIECES
    if piece <= sequence:  # a window is sequence + 1 bytes, and must fit into a single held-out piece
        raise ArgumentError(
            f"data: {source} has {len(text)} bytes, too few for sequence={sequence}: name at least "
            f"{_PIECES * (sequence + 1)} bytes of text"
        )
    tokens = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
    pieces = [*tokens[: piece * _PIECES].split(piece)]
    pieces[-1] = tokens[piece * (_PIECES - 1) :]
    first = _PIECE_STRIDE // 2
    held_out = pieces[first::_PIECE_STRIDE]
    del pieces[first::_PIECE_STRIDE]
    return torch.cat(pieces), torch.cat(held_out)


# ---- batches -----------------------------------------------------------------------------------------------------


class BatchSource:
    """Draws random windows of `sequence + 1` bytes from one text, as int64 tokens [batch, sequence + 1]."""

    def __init__(self, text: Tensor, batch: int, sequence: int, seed: int) -> None:
        self._text = text
        self._batch = batch
        self._offsets = torch.arange(sequence + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        last_start = self._text.numel() - self._offsets.numel()
        starts = torch.randint(0, last_start + 1, (self._batch, 1), generator=self._generator)
        return self._text[starts + self._offsets].long()
