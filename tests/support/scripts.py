"""The files in scripts/ as modules: they are no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support.checkout import ROOT

SCRIPTS = ROOT / "scripts"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"superoffload_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
