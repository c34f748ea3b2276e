"""`python -m benchmarks.link`, over the stand-in for the driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.all_report import headline
from benchmarks.link.steps import Rig, measure_steps
from superoffload.errors import SuperOffloadError
from superoffload.tools.cli import EXIT_OK, EXIT_USAGE
from tests.support.benchmarks import bench as start

SMALL = ["--quick", "--threads", "1", "3", "--json"]


def report_of(path: Path, printed: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert report["machine"]["kernel_isa"] and report["versions"]["torch"] and report["commit"]
    assert len(printed.splitlines()) == len(report["rows"])
    waiting = [row for row in report["rows"] if row["name"] == "waiting"]
    arrivals = [row for row in report["rows"] if row["name"] == "arrival to first chunk"]
    assert [row["threads"] for row in waiting] == [row["threads"] for row in arrivals] == [1, 3]
    assert all(0 <= row["processors_per_worker"] < 1 for row in waiting)
    assert all(0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_p99"] for row in arrivals)
    return report


def test_steps_over_the_stand_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert start("link", *SMALL, str(tmp_path / "out.json")) == EXIT_OK
    report = report_of(tmp_path / "out.json", capsys.readouterr().out)
    assert report["command"][:3] == ["python", "-m", "benchmarks.link"]
    assert "of a processor, and begins" in headline({"status": "done", "key": "link", "result": report})
    steps = [row for row in report["rows"] if row["name"] == "step"]
    assert [(row["tensors"], row["buckets"]) for row in steps] == [(256, 8), (1024, 8), (256, 64)]
    assert [row["calls_per_step"]["launches"] for row in steps] == [16, 16, 128], "to pack and to unpack"
    assert all(row["calls_per_step"]["copies"] >= 2 * row["buckets"] for row in steps), "down and up"
    assert all(row["caller_seconds_median"] > 0 for row in steps)
    noticing, per_tensor, per_bucket = report["rows"][-3:]
    names = [row["name"] for row in (noticing, per_tensor, per_bucket)]
    assert names == ["noticing, per tensor", "per tensor", "per bucket"]
    assert noticing["calls"]["launches"] == noticing["calls"]["event records"] == 2 / 1024, "two for all tensors"
    assert per_tensor["calls"]["launches"] == 0 and per_bucket["calls"]["launches"] == 2


def test_steps_that_were_skipped_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones_like", lambda tensor: torch.full_like(tensor, float("nan")))
    with pytest.raises(SuperOffloadError, match="steps were skipped"):
        measure_steps(Rig(torch.device("cpu"), lambda: None), 1)


@pytest.mark.parametrize(("option", "value"), [("--threads", "0"), ("--seconds", "0"), ("--arrivals", "-1")])
def test_numbers_that_cannot_be(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("link", option, value) == EXIT_USAGE
    assert f"{option[2:]}=" in capsys.readouterr().err
