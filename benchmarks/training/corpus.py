"""Reads text to train on, the Python standard library's sources, and cuts batches from it. One token is one byte."""

from __future__ import annotations

import os
import sysconfig
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
    """Holds training and held-out bytes (uint8)."""

    train: Tensor
    held_out: Tensor


def load_corpus(sequence: int, limit: int = DEFAULT_LIMIT) -> Corpus:
    """Reads the first `limit` bytes; `sequence` sets the least size."""
    text = b""
    for file in _standard_library_files():
        with file.open("rb") as opened:
            text += opened.read(limit - len(text))
        if len(text) == limit:
            break
    piece = len(text) // _PIECES
    if piece <= sequence:  # a window is sequence + 1 bytes, and must fit into a single held-out piece
        raise ArgumentError(f"sequence={sequence}: {len(text)} bytes of text are too few for it")
    tokens = torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
    pieces = [*tokens[: piece * _PIECES].split(piece)]
    pieces[-1] = tokens[piece * (_PIECES - 1) :]
    first = _PIECE_STRIDE // 2
    held_out = pieces[first::_PIECE_STRIDE]
    del pieces[first::_PIECE_STRIDE]
    return Corpus(torch.cat(pieces), torch.cat(held_out))


def _standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in _SKIPPED_FOLDERS]  # not walked: they may be huge
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    # By the path relative to the root, so that two machines with the same Python agree on the order.
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


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
