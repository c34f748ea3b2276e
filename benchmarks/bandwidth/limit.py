"""Measures how fast memory can be: the fastest walk that only loads and stores the same arrays as a kernel.

The fastest way (how long to stay with one array before the next, stores past the cache) differs between machines and
array sizes, so this tries a few and takes the best as the limit. It compiles walk.cpp on first use, in build/bandwidth.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_double, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import ROOT, digest_of
from benchmarks.workload import Workload
from superoffload import kernels
from superoffload.errors import SuperOffloadError

SOURCES = "benchmarks/bandwidth"
_FLAGS = "-std=c++17 -O3 -fno-tree-loop-distribute-patterns -fPIC -shared -pthread -Wall -Wextra"
_BLOCKS = (64, 256, 1024)
_LARGEST_TRIAL = 1 << 24  # elements: beyond every cache, so larger arrays prefer the same way
_TRIALS = 3
_HALF_BYTES = 2

READ, WRITE, UPDATE = range(3)  # what a walk does with an array, as in walk.cpp

# How each operation accesses master and moments, the packed gradient, the shadow and the journal's codes.
_TRAFFIC: Mapping[str, tuple[int, int, int | None, int | None]] = {
    "step": (UPDATE, READ, WRITE, None),
    "journaled": (UPDATE, READ, WRITE, WRITE),
    "undo": (UPDATE, READ, None, READ),
    "replay": (UPDATE, READ, WRITE, READ),
    "publish": (READ, READ, WRITE, None),
    "reading": (READ, READ, None, None),  # what publish reads, without writes
}
# The same where the shadow is the upper half of a split master; publish keeps the old one in two bytes of the journal.
_SPLIT_TRAFFIC = {
    "step": (UPDATE, READ, UPDATE, None),
    "journaled": (UPDATE, READ, UPDATE, WRITE),
    "undo": (UPDATE, READ, UPDATE, READ),
    "replay": (UPDATE, READ, UPDATE, READ),
    "publish": (READ, READ, UPDATE, WRITE),
    "reading": (READ, READ, READ, None),
}


class Stream(Structure):
    """Names one array and its access, as in walk.cpp."""

    _fields_ = (("base", c_void_p), ("element_size", c_size_t), ("access", c_int))


class Way(NamedTuple):
    """Describes how to walk; see walk.cpp."""

    block: int
    streaming_stores: bool


@cache
def library() -> ctypes.CDLL:
    """Loads the library, compiled if it is not there for these sources and this processor's instruction sets."""
    isa = kernels.available_isas()[-1]
    path = ROOT / "build" / "bandwidth" / f"walk-{os.uname().machine}-{isa}-{digest_of((SOURCES,))}.so"
    if not path.is_file():
        _compile_to(path)
    loaded = ctypes.CDLL(str(path))
    loaded.walk.restype = c_double
    loaded.walk.argtypes = [POINTER(Stream), c_size_t, c_size_t, c_size_t, c_int, POINTER(c_int), c_size_t, c_int]
    return loaded


def _compile_to(path: Path) -> None:
    """Compiles beside ``path`` and renames, since several processes may need it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    flags = [*_FLAGS.split(), *(["-march=native"] if os.uname().machine == "x86_64" else [])]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        try:
            subprocess.run([*compiler, *flags, str(ROOT / SOURCES / "walk.cpp"), "-o", str(made)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SuperOffloadError(
                f"memory's limit cannot be measured: {error}; install a C++17 compiler, or name one in CXX"
            ) from error
        os.replace(made, path)


def streams_of(operation: str, width: int, arrays: Workload) -> tuple[list[Stream], float]:
    """Returns the arrays an operation touches, and the bytes it moves per parameter; `width` in bytes per code."""
    state, gradient, shadow, codes = (_SPLIT_TRAFFIC if arrays.split else _TRAFFIC)[operation]
    if arrays.split and operation == "publish":
        width = _HALF_BYTES
    parts = [(arrays.master, state), (arrays.exp_avg, state), (arrays.exp_avg_sq, state), (arrays.gradient, gradient)]
    if shadow is not None:
        parts.append((arrays.shadow, shadow))
    sizes = [(array, array.element_size(), access) for array, access in parts]
    if codes is not None:
        sizes.append((arrays.codes, width, codes))
    streams = [Stream(array.data_ptr(), size, access) for array, size, access in sizes]
    return streams, float(sum(size * (2 if access == UPDATE else 1) for _, size, access in sizes))


class MemoryLimit:
    """Measures the limit of one operation on given arrays and processors; leaves state and gradient unchanged."""

    def __init__(self, operation: str, width: int, arrays: Workload, cpus: Sequence[int]) -> None:
        streams, self.bytes_per_param = streams_of(operation, width, arrays)
        self._streams, self._cpus = (Stream * len(streams))(*streams), (c_int * len(cpus))(*cpus)
        self._numel = arrays.master.numel()
        ways = [Way(block, streaming) for block in _BLOCKS for streaming in (False, True)]
        numel = min(self._numel, _LARGEST_TRIAL)
        repeats = max(1, (1 << 18) // numel)
        trials = [[self._walk(way, numel, repeats) for way in ways] for _ in range(_TRIALS)]
        self.way = min(zip(map(min, *trials), ways, strict=True))[1]

    def _walk(self, way: Way, numel: int, repeats: int) -> float:
        """Returns the mean seconds of walks over all elements by one thread per processor."""
        streams, cpus = self._streams, self._cpus
        seconds = library().walk(streams, len(streams), numel, *way, cpus, len(cpus), repeats)
        if seconds < 0:
            raise SuperOffloadError(f"the system started fewer than {len(cpus)} threads")
        return float(seconds) / repeats

    def seconds(self, repeats: int = 1) -> float:
        """Returns mean seconds of one walk over everything."""
        return self._walk(self.way, self._numel, repeats)
