"""Calls ``enable()`` right after ``import deepspeed``, in every Python that a launcher starts.

``superoffload`` is imported from the installation or checkout of this file. That folder is not put on the path, since
its other contents (``tests``, ``setup.py``) must not hide modules of the program.

This file imports nothing else: a launcher starts many short-lived interpreters that never use DeepSpeed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_BESIDE_PACKAGE = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 4))


class _Enabling(importlib.abc.Loader):
    """Runs DeepSpeed's own loader, then ``enable()``."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from superoffload.integrations.deepspeed import enable

        enable(take_over=bool(os.environ.get("SUPEROFFLOAD_TAKE_OVER")))

    def __getattr__(self, name: str) -> Any:  # get_source, resources and the like
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "superoffload":
            return importlib.machinery.PathFinder.find_spec(name, [_BESIDE_PACKAGE])
        if name != "deepspeed":
            return None
        sys.meta_path.remove(self)  # so that the other finders are asked
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Enabling(spec.loader)
        return spec


def _run_the_next_one() -> None:
    """Runs the ``sitecustomize`` that this one hides."""
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Finder())
_run_the_next_one()
