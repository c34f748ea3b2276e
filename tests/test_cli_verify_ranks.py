"""`superoffload verify --ranks`: the command, its report and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superoffload.cli import main


@pytest.mark.convergence
def test_two_ranks_are_verified(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "superoffload", "verify", "--ranks", "2", "--engine", "ddp", "--steps", "52"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--json", str(tmp_path / "copy.json")],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified: 2 ranks with ddp, 52 steps" in done.stdout
    summary = json.loads((tmp_path / "copy.json").read_text())
    assert summary["passed"] and summary["ranks"] == 2 and summary["digests_compared"] == 2 * 4 * 6
    assert set(summary["loss_at_the_end"]) == {"one process", "speculative", "synchronous"}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 52
    assert "Verified." in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--engine zero", "engine=zero: expected one of single, fsdp2"),
        ("--ranks 0", "ranks=0: expected 1 to 64"),
        ("--engine single --ranks 2", "one process is one rank"),
        ("--ranks 2 --steps 10", "steps=10: expected at least 41"),
        ("--ranks 3", "not divisible by 3 ranks"),
    ],
)
def test_refusals(options: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["verify", *options.split(), "--out", str(tmp_path)])
    assert code != 0
    assert text in capsys.readouterr().err
