"""Builds the tables that the step kernels of csrc/cuda read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from superoffload import _native
from superoffload.engine.bucket import BLOCK, Bucket, Shard

SCALARS_BYTES = 64
MAX_AXES = _native.MAX_AXES
# struct StepPiece of csrc/cuda/step.cuh; `scalars` as superoffload._native.freeze_scalars returns them.
STEP_PIECE = np.dtype(
    [
        *((name, "<u8") for name in ("master", "upper_halves", "exp_avg", "exp_avg_sq")),
        *((name, "<u8") for name in ("exp_avg_scales", "exp_avg_sq_scales", "gradient", "parameter")),
        *((name, "<u8") for name in ("numel", "first_block")),
        ("first_index", "<u8"),
        ("axis_lengths", "<u8", (MAX_AXES,)),
        ("axis_strides", "<u4", (MAX_AXES,)),
        *((name, "<u4") for name in ("start", "axis_count")),
        ("scalars", f"V{SCALARS_BYTES}"),
    ]
)

Pieces = npt.NDArray[np.void]


def blocks_of(numel: int) -> int:
    """Counts the 1024-element blocks of a piece; the last one may be partly filled."""
    return -(-numel // BLOCK)


def step_pieces(pieces: Iterable[tuple[object, ...]]) -> Pieces:
    """Makes a table of rows of ``STEP_PIECE``, without ``first_block``."""
    names = [name for name in STEP_PIECE.names or () if name != "first_block"]
    return numbered(list(pieces), STEP_PIECE, names)


def placed(first_index: int, start: int, axes: Sequence[tuple[int, int]] = ()) -> tuple[object, ...]:
    """Makes the columns of ``STEP_PIECE`` that say where a piece's elements are in the whole parameter."""
    padded = [*axes, *[(0, 0)] * (MAX_AXES - len(axes))]
    lengths, strides = zip(*padded, strict=True)
    return first_index, lengths, [stride % 2**32 for stride in strides], start % 2**32, len(axes)


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
_MOMENTS = {torch.float32: "", torch.bfloat16: "_noisy", torch.uint8: "_q8"}


def step_kernel(bucket: Bucket) -> str:
    """Names the kernel that steps a resident bucket."""
    shard = bucket.pieces[0].shard
    published = _NAMES[bucket.published_dtype] if shard.upper is None else "split"
    return f"step_{_NAMES[bucket.gradient_dtype]}_{published}{_MOMENTS[shard.exp_avg.dtype]}"


def step_table(bucket: Bucket, scalars: Sequence[bytes | None]) -> Pieces:
    """Makes the kernel's table: the pieces that have scalars, with the addresses of state, gradient and parameter."""
    rows: list[tuple[object, ...]] = []
    for piece, frozen in zip(bucket.pieces, scalars, strict=True):
        if frozen is None:
            continue
        shard = piece.shard
        starts = (
            (shard.master, piece.start),
            (None if shard.upper is None else shard.upper.read(), piece.start),
            (shard.exp_avg, piece.start),
            (shard.exp_avg_sq, piece.start),
            _scales(shard, shard.exp_avg, piece.start),
            _scales(shard, shard.exp_avg_sq, piece.start),
            (bucket.gradient, piece.offset),
            (shard.target(), piece.start),
        )
        addresses = (0 if memory is None else memory.data_ptr() + memory.element_size() * at for memory, at in starts)
        rows.append((*addresses, piece.numel, *placed(piece.start, shard.offset, shard.axes), frozen))
    return step_pieces(rows)


def _scales(shard: Shard, moment: Tensor, start: int) -> tuple[Tensor | None, int]:
    """Finds the scales of an 8-bit moment, which lie behind its codes, from element ``start`` on; others have none."""
    if moment.dtype is not torch.uint8:
        return None, 0
    return moment, shard.numel + start // _native.MOMENT_BLOCK
