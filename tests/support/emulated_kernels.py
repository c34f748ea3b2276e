"""The kernels of csrc/cuda on this processor: built once, launched by name on NumPy arrays."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from superoffload.links.cuda import geometry
from superoffload.links.cuda.geometry import Pieces, numbered
from tests.support.checkout import ROOT

# Launches as the pipeline makes them (csrc/cuda/device_bucket.h, streams.cpp).
THREADS = 128  # per CUDA block, for every kernel
# 1024-element blocks that a CUDA block takes at a time; for sums of bits, blocks of 2048 bytes
BLOCKS_PER_CUDA_BLOCK = {"pack": 8, "unpack": 4, "step": 1, "sum": 4, "compare": 4}


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


@cache
def library_path() -> Path:
    """The shared library that exports ``emulate_launch`` (csrc/tests/emulated_kernels.cpp)."""
    if shutil.which("make") is None or shutil.which("g++") is None:
        pytest.skip("needs make and g++ to build the emulated kernels")
    command = ["make", "--silent", "--no-print-directory", "-f", "csrc/tests/Makefile", "emulated"]
    lock = ROOT / "build" / "tests" / "emulated.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # processes that run tests side by side build it one after the other
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert shown.returncode == 0, shown.stderr
    return ROOT / shown.stdout.split()[-1]


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    library.emulated_kernel.restype = ctypes.c_char_p
    return library


def kernel_names() -> list[str]:
    """Every kernel there is."""
    names: list[str] = []
    while (name := _library().emulated_kernel(len(names))) is not None:
        names.append(name.decode())
    return names


def launch(kernel: str, pieces: geometry.Pieces, *addresses: int, grid: int | None = None) -> None:
    """One kernel over ``pieces``; ``addresses``: what it takes behind them and their number."""
    if grid is None:
        grid = grid_for(kernel, geometry.count_blocks(pieces))
    values = [table_argument(pieces, pieces.ctypes.data), ctypes.c_uint(len(pieces)), *map(ctypes.c_void_p, addresses)]
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    _library().emulate_launch(kernel.encode(), ctypes.c_uint(grid), ctypes.c_uint(THREADS), arguments)
