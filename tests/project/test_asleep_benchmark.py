"""`python -m benchmarks.asleep` runs, on little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.asleep import SETTINGS, main


@pytest.mark.in_turn
def test_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["--numel", "2e6", "--rounds", "1", "--folder", str(tmp_path), "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(SETTINGS)
    assert [round(row["kept_bytes_per_param"]) for row in rows] == [12, 12, 6, 0, 0, 0]
    assert all(row["seconds_sleep_median"] > 0 and row["seconds_wake_median"] > 0 for row in rows)
