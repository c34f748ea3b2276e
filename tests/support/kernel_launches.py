"""Describes how the pipeline launches kernels, for callers without it (csrc/cuda/device_bucket.h, streams.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from superoffload.links.cuda.geometry import Pieces, numbered

THREADS = 128  # per CUDA block, for every kernel
# 1024-element blocks that a CUDA block takes at a time; for sums of bits, blocks of 2048 bytes
BLOCKS_PER_CUDA_BLOCK = {"pack": 8, "unpack": 4, "step": 1, "sum": 4, "compare": 4}

# Matches struct CopyPiece of csrc/cuda/pieces.cuh. `address`: of the piece's gradient or parameter; `offset`: elements
# into the packed gradient or the staged parameters.
COPY_PIECE = np.dtype([("address", "<u8"), ("offset", "<u8"), ("numel", "<u8"), ("first_block", "<u8")])


def copy_pieces(pieces: Iterable[tuple[int, int, int]]) -> Pieces:
    """Builds pieces from (address, offset, numel), in the order of their block sums."""
    return numbered(list(pieces), COPY_PIECE, ("address", "offset", "numel"))


# Matches struct SumPiece of csrc/cuda/bit_sums.cuh. `numel`: 16-bit elements, 1024 to a block; `sums`: its own.
SUM_PIECE = np.dtype([("address", "<u8"), ("sums", "<u8"), ("numel", "<u8"), ("first_block", "<u8")])


def sum_pieces(pieces: Iterable[tuple[int, int, int]]) -> Pieces:
    """Builds pieces from (address, address of its sums, elements of 16 bits)."""
    return numbered(list(pieces), SUM_PIECE, ("address", "sums", "numel"))


TABLE_BYTES = 4000  # of pieces in struct Table of csrc/cuda/pieces.cuh


def table_argument(pieces: Pieces, there: int) -> ctypes.Array[ctypes.c_char]:
    """Returns the first argument of a kernel: its pieces, or where they are too long ``there``, their address."""
    inline = pieces.nbytes <= TABLE_BYTES
    contents = (0 if inline else there).to_bytes(8, "little") + (pieces.tobytes() if inline else b"")
    return ctypes.create_string_buffer(contents, 8 + TABLE_BYTES)


def grid_for(kernel: str, blocks: int) -> int:
    """Returns the number of CUDA blocks for ``blocks`` of 1024 elements; kernels stride, so any grid does the work."""
    return max(1, -(-blocks // BLOCKS_PER_CUDA_BLOCK[kernel.partition("_")[0]]))
