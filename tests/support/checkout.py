"""The checkout that the tests run from, and libraries that they compile in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compiled(name: str, sources: Sequence[str], includes: Sequence[str] = (), flags: Sequence[str] = ()) -> Path:
    """A shared library of sources, compiled where it is older than they are."""
    library = ROOT / "build" / "tests" / name
    made = max((ROOT / source).stat().st_mtime for source in (*sources, *includes))
    if not library.exists() or library.stat().st_mtime < made:
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
        subprocess.run([*command, *flags, *sources, "-o", str(fresh), "-ldl"], cwd=ROOT, check=True, timeout=240)
        fresh.replace(library)
    return library
