"""Marks of tests that need packages which superoffload does not."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install {' '.join(missing)}")
