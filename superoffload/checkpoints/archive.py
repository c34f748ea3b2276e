"""``state.pt``: what ``torch.save`` writes, looked at before ``torch.load`` makes more of it than its size allows."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import torch

from superoffload.checkpoints.manifest import LARGEST_STATE
from superoffload.errors import ArgumentError

_MOST_ENTRIES = 1 << 17  # one per tensor, and a few
_LARGEST_PICKLE = 64 << 20  # bytes: an empty list takes one there, and 64 in memory
_ENTRY = b"PK\x01\x02"  # what every entry of the archive's table begins with


def read_archive(data: bytes) -> Any:
    """Its content. ArgumentError: beyond the limits; errors of any kind: not what ``torch.save`` writes.

    Tensors take no more memory than ``data``; all else up to some 100 times the 64 MiB that it may have.
    """
    check_archive(data)
    return torch.load(io.BytesIO(data), weights_only=True)  # the buffer shares its bytes


def check_archive(data: bytes) -> None:
    """Also before it is saved, so that nothing is written that cannot be read back."""
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
