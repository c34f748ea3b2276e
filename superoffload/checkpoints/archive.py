"""Reads ``state.pt`` safely: checks the archive before ``torch.load`` takes more memory than its size allows."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from superoffload.checkpoints.manifest import LARGEST_STATE
from superoffload.errors import ArgumentError

_MOST_ENTRIES = 1 << 17  # one per tensor, and a few
_LARGEST_PICKLE = 64 << 20  # bytes; an empty list takes one byte in the pickle and 64 bytes in memory
_ENTRY = b"PK\x01\x02"  # every entry of the archive's table begins with these bytes


def read_archive(data: bytes) -> Any:
    """Returns the archive's content. Raises ArgumentError beyond the limits, other errors for other data.

    Tensors take no more memory than ``data``; other values take up to about 100 times their 64 MiB.
    """
    check_archive(data)
    return torch.load(io.BytesIO(data), weights_only=True)  # the buffer shares its bytes


def check_archive(data: bytes) -> None:
    """Raises ArgumentError for an archive beyond the limits; ``save`` calls it too and writes nothing unreadable."""
    if len(data) > LARGEST_STATE:
        raise ArgumentError(f"{len(data)} bytes, expected at most {LARGEST_STATE}")
    count = data.count(_ENTRY)
    if count > _MOST_ENTRIES:
        raise ArgumentError(f"{count} tensors or more, expected at most {_MOST_ENTRIES}")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED or one.file_size != one.compress_size for one in entries):
        raise ArgumentError("compressed, which torch.save does not do")
    if sum(one.file_size for one in entries) > len(data):
        raise ArgumentError("an archive whose parts overlap")
    largest = max((one.file_size for one in entries if one.filename.endswith(".pkl")), default=0)
    if largest > _LARGEST_PICKLE:
        raise ArgumentError(
            f"{largest} bytes beside tensors, expected at most {_LARGEST_PICKLE}; keep long lists as tensors"
        )
