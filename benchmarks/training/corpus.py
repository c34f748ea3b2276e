"""Reads text to train on, and cuts batches from it: the Python standard library's sources, or the user's files.

One token is one byte, so any text works without a vocabulary. Every Python installation has the default corpus.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from superoffload.errors import ArgumentError

DEFAULT_LIMIT = 8 << 20  # bytes; a default run reads each at most once, so more would only cost memory

# Skipped folders of the standard library: tests are mostly tables, the rest does not belong to the library.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

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
    files: int
    truncated: bool
    sha256: str

    def describe(self) -> dict[str, str | int | bool]:
        """Returns what a summary needs to identify the same text."""
        return {
            "source": self.source,
            "files": self.files,
            "train_bytes": self.train.numel(),
            "held_out_bytes": self.held_out.numel(),
            "truncated": self.truncated,
            "sha256": self.sha256,
        }


def load_corpus(paths: Sequence[str] | None, sequence: int, limit: int = DEFAULT_LIMIT) -> Corpus:
    """Reads at most `limit` bytes of text and splits them; `sequence` sets the least size."""
    if paths:
        files, source = _user_files(paths), ", ".join(paths)
    else:
        files, source = _standard_library_files(), "Python standard library sources"
    text, used, truncated = _read(files, limit)
    train, held_out = _split(text, sequence, f"the first part of {source}" if truncated else source)
    digest = hashlib.sha256(text).hexdigest()
    return Corpus(train, held_out, source, used, truncated, digest)


def _standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _SKIPPED_FOLDERS]  # not walked: they may be huge
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ArgumentError(
            f"data: the default corpus is the Python standard library's *.py files, but there are none in {root}; "
            f"name text of your own with --data PATH..."
        )
    # By the path relative to the root, so that two machines with the same Python agree on the order.
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _user_files(paths: Iterable[str]) -> list[Path]:
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        try:
            path.stat()
        except FileNotFoundError:
            raise ArgumentError(
                f"data={name}: no such file or folder; give --data existing text files or folders"
            ) from None
        except (OSError, ValueError) as error:  # the name is too long, or permission is missing
            reason = getattr(error, "strerror", None) or error
            raise ArgumentError(f"data={name}: cannot be read ({reason}); give --data text files or folders") from None
        if path.is_dir():
            inside = sorted(entry for entry in path.rglob("*") if _is_text_of_folder(entry, path))
            if not inside:
                raise ArgumentError(f"data={name}: the folder holds no text files; name files, or another folder")
            files.extend(inside)
        elif path.is_file():
            files.append(path)
        else:
            raise ArgumentError(f"data={name}: expected a text file or a folder of text files, this is neither")
    return files


def _is_text_of_folder(path: Path, root: Path) -> bool:
    """Returns whether `path` is a visible regular file without NUL bytes near its start; skips symbolic links."""
    if any(part.startswith(".") for part in path.relative_to(root).parts) or path.is_symlink() or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(4096)
    except OSError as error:
        raise ArgumentError(f"data={path}: cannot be read ({error.strerror}); fix it or leave it out") from error


def _read(files: Iterable[Path], limit: int) -> tuple[bytes, int, bool]:
    """Returns the files' bytes up to `limit`, the number of files they came from, and whether anything was left out."""
    pieces: list[bytes] = []
    room = limit
    used = 0
    for path in files:
        if room == 0:
            return b"".join(pieces), used, True
        try:
            with path.open("rb") as file:
                piece = file.read(room)
                complete = not file.read(1)
        except OSError as error:
            raise ArgumentError(f"data={path}: cannot be read ({error.strerror}); fix it or leave it out") from error
        pieces.append(piece)
        room -= len(piece)
        used += 1
        if not complete:
            return b"".join(pieces), used, True
    return b"".join(pieces), used, False


def _split(text: bytes, sequence: int, source: str) -> tuple[Tensor, Tensor]:
    piece = len(text) // _PIECES
    # A window is sequence + 1 bytes, and must fit into a single held-out piece.
    if piece <= sequence:
        needed = _PIECES * (sequence + 1)
        raise ArgumentError(
            f"data: {source} holds {len(text)} bytes of text, too short for sequence={sequence}: at least {needed} "
            f"bytes are needed; give more text with --data, read more of it with --max-corpus-mib, or give a shorter "
            f"--sequence"
        )
    tokens = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
    bounds = [(index * piece, (index + 1) * piece if index + 1 < _PIECES else len(text)) for index in range(_PIECES)]
    is_held_out = [index % _PIECE_STRIDE == _PIECE_STRIDE // 2 for index in range(_PIECES)]
    train = torch.cat([tokens[a:b] for (a, b), held in zip(bounds, is_held_out, strict=True) if not held])
    held_out = torch.cat([tokens[a:b] for (a, b), held in zip(bounds, is_held_out, strict=True) if held])
    return train, held_out


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


def held_out_batches(text: Tensor, batch: int, sequence: int, count: int) -> list[Tensor]:
    """Returns `count` evenly spread batches of windows, the same for every evaluation of every run."""
    windows = batch * count
    last_start = text.numel() - (sequence + 1)
    starts = torch.linspace(0, last_start, windows, dtype=torch.float64).long().unsqueeze(1)
    tokens = text[starts + torch.arange(sequence + 1)].long()
    return list(tokens.split(batch))
