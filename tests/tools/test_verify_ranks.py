"""`superoffload verify --ranks`: the command, its report and its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superoffload.tools.cli import main
from superoffload.tools.convergence.compare import Tolerance
from superoffload.tools.convergence.convergence_setup import Setup
from superoffload.tools.convergence.distributed_run import Curve
from superoffload.tools.convergence.suite import Result, judge_fates


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
    ("clipped", "committed", "problem", "inconclusive"),
    [
        (39, 0, "", "each of the 39 steps that were taken had to be clipped to max_grad_norm=1"),
        (36, 0, "3 steps were not clipped, and yet no bucket was committed", ""),
        (36, 30, "", ""),
    ],
)
def test_nothing_committed(
    clipped: int, committed: int, problem: str, inconclusive: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Where every step was clipped there was nothing to commit; where some were not, it is a failure."""

    def judged(setup: Setup, engine: str, count: int, say: object) -> Result:
        stats = {"buckets_speculated": 400, "buckets_replayed": 300, "buckets_committed": committed}
        stats |= {"steps": 39, "clipped_steps": clipped}
        result = Result(
            {"speculative": Curve("always", stats=stats)}, Tolerance([1.0], [0.1], [1.0], [0.1], {}, {"w": 0.0})
        )
        judge_fates(result, setup)
        return result

    monkeypatch.setattr("superoffload.tools.convergence.suite.verify_ranks", judged)
    code = main(["verify", "--ranks", "2", "--steps", "41", "--out", str(tmp_path)])
    printed, summary = capsys.readouterr().out, json.loads((tmp_path / "summary.json").read_text())
    assert (code == 0) == summary["passed"] == (committed > 0)
    assert ("FAILED" in printed) == bool(problem) and problem in "".join(summary["problems"])
    assert ("INCONCLUSIVE" in printed) == bool(inconclusive) and inconclusive in summary["inconclusive"]
    assert inconclusive in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--engine zero", "engine=zero: expected one of single, fsdp2"),
        ("--engine plain-fsdp2 --ranks 2", "engine=plain-fsdp2: expected one of single, fsdp2"),
        ("--ranks 0", "ranks=0: expected 1 to 64"),
        (
            "--engine single --ranks 2",
            "one process is one rank; choose --engine fsdp2, ddp, tp, pp, ep, deepspeed, titan",
        ),
        ("--engine tp --ranks 1", "engine=tp with ranks=1: two ranks share each matrix"),
        ("--engine pp --ranks 3", "engine=pp with ranks=3: the model has two stages"),
        ("--engine ep --ranks 5", "engine=ep with ranks=5: two ranks share the experts; expected an even number"),
        ("--ranks 2 --steps 10", "steps=10: expected at least 41"),
        ("--ranks 2 --steps 24", "steps=24: expected at least 41"),
        ("--ranks 2 --seed -1", "seed=-1: expected a whole number from 0"),
        ("--ranks 2 --max-grad-norm 2", "--max-grad-norm has no effect with --ranks"),
        ("--engine ddp --inject nan@3", "--inject has no effect with --ranks or --engine"),
    ],
)
def test_refusals(options: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["verify", *options.split(), "--out", str(tmp_path)])
    assert code != 0
    assert text in capsys.readouterr().err


def test_torchtitan_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("superoffload.tools.convergence.engines.find_spec", lambda name: None)
    assert main(["verify", "--engine", "titan", "--ranks", "2", "--out", str(tmp_path)]) == 2
    assert "engine=titan: torchtitan is not installed; pip install --no-deps -r requirements/torchtitan.txt" in (
        capsys.readouterr().err
    )
