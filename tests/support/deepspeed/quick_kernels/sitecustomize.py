"""Compiles of DeepSpeed what tests need, in a quarter of the time: its Adam, as one file and without debug information.

Not its collectives over shared memory, which only inference calls: DeepSpeed builds them before the first collective
of any kind. Without them it uses gloo, as it does by itself on other systems than Linux.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_BUILDERS = "deepspeed.ops.op_builder.cpu"
_ADAM = str(Path(__file__).with_name("cpu_adam.cpp").resolve())


def _change(builders: Any) -> None:
    adam, args = builders.CPUAdamBuilder, builders.CPUAdamBuilder.cxx_args
    adam.sources = lambda self: [_ADAM]
    adam.cxx_args = lambda self: [*args(self), "-g0"]
    builders.ShareMemCommBuilder.is_compatible = lambda self, verbose=False: False


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _BUILDERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _change(module)

            vars(spec.loader)["exec_module"] = execute_and_change
        return spec


@cache
def install() -> None:
    """Once, before or after DeepSpeed is loaded; a program finds this file on its path and is not asked."""
    if _BUILDERS in sys.modules:
        _change(sys.modules[_BUILDERS])
    else:
        sys.meta_path.insert(0, _Finder())


install()
