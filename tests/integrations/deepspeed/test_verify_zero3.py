"""`superoffload verify --ranks 2 --engine deepspeed`: ZeRO-3 against one process, with clips, a NaN and an infinity."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.convergence
@pytest.mark.in_turn
def test_two_zero3_ranks_are_verified(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "superoffload", "verify", "--ranks", "2", "--engine", "deepspeed"]
    done = subprocess.run(
        [*command, "--steps", "52", "--out", str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified: 2 ranks with deepspeed, 52 steps" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    stats = summary["stats"]
    assert summary["digests_compared"] == 2 * 4 * 6
    assert stats["skipped_steps"] == 2 and stats["steps"] == 50
    assert stats["buckets_committed"] > 0 and stats["buckets_replayed"] > 0
    assert stats["clipped_steps"] >= 3
