"""Calls the C++ walks over memory; they are compiled on first use, into build/bandwidth."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_size_t, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

from benchmarks.sources import ROOT, digest_of
from superoffload.errors import SuperOffloadError

SOURCES = "benchmarks/bandwidth"
# Wider loops carry their instruction set themselves, so the library runs on every processor of the architecture.
_FLAGS = "-std=c++17 -O3 -fno-fast-math -ffp-contract=off -fPIC -shared -pthread -Wall -Wextra"


class Access(IntEnum):
    """Names what a walk does with an array, as in traversal.h."""

    read = 0
    write = 1
    update = 2


class Stream(Structure):
    """Names one array and its access, as in traversal.h."""

    _fields_ = (("base", c_void_p), ("element_size", c_size_t), ("access", c_int))


@cache
def library() -> ctypes.CDLL:
    """Loads the library, compiled if it is not there for these sources."""
    path = ROOT / "build" / "bandwidth" / f"walks-{os.uname().machine}-{digest_of((SOURCES,))}.so"
    if not path.is_file():
        compile_to(path)
    loaded = ctypes.CDLL(str(path))
    loaded.loops_name.restype, loaded.loops_name.argtypes = c_char_p, [c_size_t]
    loaded.walk.restype = c_double
    loaded.walk.argtypes = [
        POINTER(Stream), c_size_t, c_size_t, c_size_t, c_char_p, c_int, POINTER(c_int), c_size_t, c_int,
    ]  # fmt: skip
    return loaded


def compile_to(path: Path, *flags: str) -> None:
    """Compiles beside ``path`` and renames, since several processes may need it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    sources = [str(ROOT / SOURCES / name) for name in ("loops.cpp", "traversal.cpp")]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        command = [*compiler, *_FLAGS.split(), *flags, *sources, "-o", str(made)]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SuperOffloadError(
                f"memory's limit cannot be measured: {error}; install a C++17 compiler, or name one in CXX"
            ) from error
        os.replace(made, path)


def memory_loops() -> list[str]:
    """Lists loops by the width of their vectors, narrowest first; the first one runs on every processor."""
    names = (library().loops_name(index) for index in range(4))
    return [name.decode() for name in names if name]


def walk_memory(
    streams: Sequence[Stream],
    numel: int,
    block: int,
    loops: str,
    streaming_stores: bool,
    cpus: Sequence[int],
    repeats: int = 1,
) -> float:
    """Returns the seconds of ``repeats`` walks over all elements by one thread per entry of ``cpus`` (-1: anywhere)."""
    if loops not in memory_loops():
        raise ValueError(f"loops: {loops!r}, expected one of {', '.join(memory_loops())}")
    if block < 1 or repeats < 1 or not cpus:
        raise ValueError(f"block={block}, repeats={repeats}, cpus={list(cpus)}: expected at least one of each")
    arrays = (Stream * len(streams))(*streams)
    threads = (c_int * len(cpus))(*cpus)
    seconds = library().walk(
        arrays, len(streams), numel, block, loops.encode(), streaming_stores, threads, len(cpus), repeats
    )
    if seconds < 0:
        raise RuntimeError(f"the system started fewer than {len(cpus)} threads")
    return float(seconds)
