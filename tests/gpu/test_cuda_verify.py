"""What users run first on their GPU: `superoffload verify`, and the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from superoffload.tools.cli import main
from tests.support.checkout import ROOT


@pytest.mark.gpu
@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
def test_verify(delivery: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quiet", "--device", "cuda", "--delivery", delivery]) == 0, capsys.readouterr().out


@pytest.mark.gpu
def test_demo(tmp_path: Path) -> None:
    command = [sys.executable, "examples/demo.py", "--device", "cuda", "--first-steps", "40", "--steps", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
