"""Builds the tables that the step kernels of csrc/cuda read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from superoffload.engine.bucket import BLOCK, Bucket

SCALARS_BYTES = 64
# struct StepPiece of csrc/cuda/step.cuh; `scalars` as superoffload._native.freeze_scalars returns them.
STEP_PIECE = np.dtype(
    [
        *((name, "<u8") for name in ("master", "exp_avg", "exp_avg_sq", "gradient", "parameter")),
        ("numel", "<u8"),
        ("first_block", "<u8"),
        ("first_index", "<u4"),
        ("scalars", f"V{SCALARS_BYTES}"),
        ("padding", "V4"),
    ]
)

Pieces = npt.NDArray[np.void]


def blocks_of(numel: int) -> int:
    """Counts the 1024-element blocks of a piece; the last one may be partly filled."""
    return -(-numel // BLOCK)


def step_pieces(pieces: Iterable[tuple[int | bytes, ...]]) -> Pieces:
    """Makes a table of (master, exp_avg, exp_avg_sq, gradient, parameter, numel, first_index, scalars) rows."""
    names = ("master", "exp_avg", "exp_avg_sq", "gradient", "parameter", "numel", "first_index", "scalars")
    return numbered(list(pieces), STEP_PIECE, names)


def numbered(rows: Sequence[tuple[object, ...]], dtype: np.dtype[np.void], names: Sequence[str]) -> Pieces:
    """Makes a table of pieces, each with the number of its first block."""
    table = np.zeros(len(rows), dtype)
    for i, row in enumerate(rows):
        for name, value in zip(names, row, strict=True):
            table[name][i] = value
    blocks = [blocks_of(int(numel)) for numel in table["numel"]]
    table["first_block"] = np.cumsum([0, *blocks], dtype=np.uint64)[: len(rows)]
    return table


def count_blocks(pieces: Pieces) -> int:
    """Counts the blocks of all pieces together."""
    return sum(blocks_of(int(numel)) for numel in pieces["numel"])


_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def step_kernel(bucket: Bucket) -> str:
    """Names the kernel that steps a resident bucket."""
    noisy = "_noisy" if bucket.pieces[0].shard.exp_avg.dtype is torch.bfloat16 else ""
    return f"step_{_NAMES[bucket.gradient_dtype]}_{_NAMES[bucket.published_dtype]}{noisy}"


def step_table(bucket: Bucket, scalars: Sequence[bytes | None]) -> Pieces:
    """Makes the kernel's table: the pieces that have scalars, with the addresses of state, gradient and parameter."""
    rows: list[tuple[int | bytes, ...]] = []
    for piece, frozen in zip(bucket.pieces, scalars, strict=True):
        if frozen is None:
            continue
        shard = piece.shard
        starts = (
            *((tensor, piece.start) for tensor in (shard.master, shard.exp_avg, shard.exp_avg_sq)),
            (bucket.gradient, piece.offset),
            (shard.target(), piece.start),
        )
        addresses = (tensor.data_ptr() + tensor.element_size() * start for tensor, start in starts)
        rows.append((*addresses, piece.numel, (shard.offset + piece.start) % 2**32, frozen))
    return step_pieces(rows)
