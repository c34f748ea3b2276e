"""The kernels of csrc/cuda on this processor: built once, launched by name on NumPy arrays."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from superoffload.engine.bucket import BLOCK
from superoffload.links.cuda import geometry
from tests.support.checkout import ROOT
from tests.support.kernel_launches import THREADS, grid_for, table_argument

NAMES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
# Of steps: the types of gradient and published parameter.
STEPS = (
    ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "bf16"), ("fp32", "fp16"),
    ("fp32", "split"), ("bf16", "split"),
)  # fmt: skip


@contextmanager
def only_one(name: str) -> Iterator[None]:
    """One process at a time, of those that run tests side by side."""
    path = ROOT / "build" / "tests" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or the process has ended
        yield


@cache
def library_path() -> Path:
    """The shared library that exports ``emulate_launch`` (csrc/tests/emulated_kernels.cpp)."""
    if shutil.which("make") is None or shutil.which("g++") is None:
        pytest.skip("needs make and g++ to build the emulated kernels")
    command = ["make", "--silent", "--no-print-directory", "-f", "csrc/tests/Makefile", "emulated"]
    with only_one("emulated"):
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


def step_kernel(types: tuple[str, str]) -> str:
    return f"step_{NAMES[types[0]]}_{NAMES.get(types[1], types[1])}"


def blocks_of(gradient: npt.NDArray[Any] | Tensor) -> int:
    numel = gradient.size if isinstance(gradient, np.ndarray) else gradient.numel()
    return -(-numel // BLOCK)
