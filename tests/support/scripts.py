"""Files outside packages as modules: those in scripts/, and setup.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.support.checkout import ROOT

SCRIPTS = ROOT / "scripts"


def load_script(name: str) -> ModuleType:
    return load_file(SCRIPTS / f"{name}.py")


def load_file(path: Path) -> ModuleType:
    """The module ``superoffload_NAME``."""
    spec = importlib.util.spec_from_file_location(f"superoffload_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
