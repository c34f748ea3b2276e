"""Programs whose calls to the disk fail one after the other, or are the last: csrc/tests/disk_faults.cpp."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.checkout import ROOT, compiled

KILL, TEAR, SHORT = -1, -2, -3  # the call is the last; half of a write is; half of a write, and on
KILLED = 77  # the status of a process that a fault has ended


def run(module: str, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """``python -m module`` with the library."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(compiled("libdiskfaults.so", ["csrc/tests/disk_faults.cpp"])),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)


class Record(NamedTuple):
    """What a program did below a folder while it was watched."""

    calls: list[tuple[str, str, bool]]  # kind, path, whether it needs space; in the order in which a fault counts them
    changes: list[list[str]]  # what changed the disk: tests/checkpoints/power_cuts.py


class Watch:
    """In such a program: watches its calls below a folder."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)  # where the library was loaded, it is part of the program
        self._library.disk_record.restype = ctypes.c_char_p
        self.record = Record([], [])

    @contextmanager
    def faults(self, root: Path, at: int = 0, fault: int = 0, *, lasting: bool = False) -> Iterator[None]:
        """The ``at``th call, from 1, fails with the errno ``fault``; ``lasting``: later ones that need space do too."""
        self._library.disk_begin(os.fsencode(root), ctypes.c_long(at), fault, int(lasting))
        try:
            yield
        finally:
            self._library.disk_end()
            self.record = parse(self._library.disk_record())


def parse(text: Any) -> Record:
    lines = [line.split("\t") for line in os.fsdecode(text).splitlines()]
    calls = [(line[1], line[2], line[3] == "space") for line in lines if line[0] == "call"]
    return Record(calls, [line for line in lines if line[0] != "call"])
