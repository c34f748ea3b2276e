"""Where the extension lies that these tests run with."""

from __future__ import annotations

from pathlib import Path


def real_extension() -> Path:
    from superoffload import _native

    return Path(_native.__file__)
