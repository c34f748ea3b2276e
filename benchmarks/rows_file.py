"""Writes the rows of a benchmark beside facts about the machine, the versions and the commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.facts import benchmark_machine_facts, commit, version_facts


def write_rows(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Writes JSON to ``path``; None: the user wants no file."""
    if path is None:
        return
    facts = {"machine": benchmark_machine_facts(), "versions": version_facts(), "commit": commit()}
    path.write_text(json.dumps({**facts, "rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
