"""`python -m tests.convergence`: the command, its report and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convergence.__main__ import main
from tests.support.checkout import ROOT


@pytest.mark.convergence
def test_two_ranks_are_compared(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.convergence.short_runs", "--ranks", "2", "--engine", "ddp"]
    outputs = ["--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    done = subprocess.run([*command, *outputs], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified: 2 ranks with ddp, 16 steps" in done.stdout
    summary = json.loads((tmp_path / "x.json").read_text())
    assert summary["passed"] and summary["ranks"] == 2 and summary["digests_compared"] == 2 * 4 * 4
    assert set(summary["loss_at_the_end"]) == {"one process", "speculative", "synchronous"}
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


REFUSED = {
    "--engine zero": "engine=zero: expected one of single, fsdp2",
    "--ranks 0": "ranks=0: expected 1 to 64",
    "--engine single --ranks 2": "one process is one rank; choose --engine fsdp2, ddp, tp, pp, ep, deepspeed, zero2",
    "--engine tp --ranks 1": "engine=tp with ranks=1: two ranks share each matrix",
    "--engine deepspeed": "engine=deepspeed: deepspeed is not installed; pip install deepspeed==",
    "--ranks 2 --steps 10": "steps=10: expected at least 41",
    "--ranks 2 --seed -1": "seed=-1: expected a whole number from 0",
    "--device cuda": "device=cuda: expected engine single, fsdp2 or ddp, under torchrun",
    "--json /no/such/folder/x.json": "json=/no/such/folder/x.json: the file cannot be written",
}


def test_refusals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as lacking:
        lacking.setattr("tests.convergence.engines.find_spec", lambda name: None if name == "deepspeed" else name)
        for options, text in REFUSED.items():
            assert main(options.split()) == 2
            assert text in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--ranks", "4"]) == 2
    assert "ranks=4: 2 ranks were launched (WORLD_SIZE)" in capsys.readouterr().err
