"""Finds the folder benchmarks/, which only a checkout of the repository has."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from superoffload.errors import SuperOffloadError

_ROOT = Path(__file__).resolve().parents[3]


def of_checkout(module: str, what: str, command: str) -> ModuleType:
    """Imports a module of benchmarks/; without one raises an error that names ``what`` and where ``command`` works."""
    if not (_ROOT / "benchmarks" / f"{module}.py").is_file():
        raise SuperOffloadError(
            f"{what}: the installed package does not have it; clone the repository, run `make build` there, and then "
            f"in the clone: .venv/bin/{command}"
        )
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    return import_module(f"benchmarks.{module}")
