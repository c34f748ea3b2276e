"""Writes results as JSON that a person can read and compare: a fact per line, and a row of a table per line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superoffload.tools.output import naming_write_errors


def as_text(values: Mapping[str, Any]) -> str:
    """Returns JSON with a line per key, and a line per element of a list of objects; NaN raises ValueError."""
    lines = []
    for key, value in values.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            rows = ",\n".join(f"  {json.dumps(each, allow_nan=False)}" for each in value)
            lines.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_results(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all, even if the process ends; a link or a device is written through."""
    target, text = Path(path), as_text(values)
    with naming_write_errors(path):
        if target.is_symlink() or (target.exists() and not target.is_file()):
            target.write_text(text, encoding="utf-8")
            return
        new = target.with_name(f"{target.name}.new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, target)
