"""`python -m benchmarks.all` runs every benchmark that there is, and ends with a line for each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import all as all_benchmarks
from benchmarks.all_report import GPU_SUITE
from benchmarks.jobs import LEFT, RESULT_PATH, Job
from superoffload.tools.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from tests.support.benchmarks import parser_of

RANKS = {"rows": [{"name": "light", "of_step": 0.005}]}


@pytest.mark.parametrize("name", all_benchmarks.BENCHMARKS)
@pytest.mark.parametrize("quick", [False, True])
def test_every_benchmark_is_asked_for_something_it_understands(name: str, quick: bool, tmp_path: Path) -> None:
    (job,) = all_benchmarks.all_jobs([name], tmp_path, quick=quick, cuda=True)
    assert list(job.command[:3]) == [sys.executable, "-m", f"benchmarks.{name}"]
    args = parser_of(name).parse_args(list(job.command[3:]))
    assert args.json == RESULT_PATH
    assert job.settings["bench"] == name


def test_the_gpu_suite_is_left_out_without_a_gpu(tmp_path: Path) -> None:
    (job,) = all_benchmarks.all_jobs([GPU_SUITE], tmp_path, quick=True, cuda=False)
    assert job.absent == "needs a GPU"
    (job,) = all_benchmarks.all_jobs([GPU_SUITE], tmp_path, quick=True, cuda=True)
    assert job.absent is None and job.continues


def small_job(key: str, result: dict[str, Any] | None, **more: Any) -> Job:
    script = f"import json, sys; print('table of {key}')\n"
    script += "sys.exit('broken')" if result is None else f"json.dump({result!r}, open(sys.argv[1], 'w'))"
    return Job(key, [sys.executable, "-c", script, RESULT_PATH], {"bench": key}, keeps_output=True, **more)


def run_all(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(all_benchmarks, "all_jobs", lambda *_, **__: jobs)
    status = all_benchmarks.main(["--out", str(tmp_path), "--quiet", *options])
    report: dict[str, Any] = json.loads((tmp_path / "all.json").read_text())
    return status, report


def test_a_line_for_every_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        small_job("ranks", RANKS),
        small_job("zero3", None, absent="deepspeed is not installed"),
        small_job("new", {"rows": []}),
    ]
    status, report = run_all(jobs, tmp_path, monkeypatch)
    assert status == EXIT_OK
    assert [row["status"] for row in report["rows"]] == ["done", "not here", "done"]
    assert report["left"] == [] and report["command"][:4] == ["python", "-m", "benchmarks.all", "--out"]
    printed = capsys.readouterr().out
    for text in ("rank_check=light: 0.50% of a step", "is not installed", "0 rows"):
        assert text in printed
    assert "table of ranks" in (tmp_path / "all.log").read_text()


def test_a_failure_is_told_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = run_all([small_job("ranks", None)], tmp_path, monkeypatch)
    assert status == EXIT_FAILED and report["rows"][0]["error"] == "exit status 1: broken"
    assert "exit status 1: broken" in capsys.readouterr().out
    status, _ = run_all([small_job("ranks", RANKS)], tmp_path, monkeypatch, "--retry")
    assert status == EXIT_OK


def test_the_limit_leaves_the_rest_for_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [small_job("ranks", RANKS)]
    status, report = run_all(jobs, tmp_path, monkeypatch, "--time-limit", "0.001")
    assert status == LEFT and report["left"] == ["ranks"] and "left for another call: ranks" in capsys.readouterr().out
    assert run_all(jobs, tmp_path, monkeypatch)[0] == EXIT_OK


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--only", "speed"], "only=speed: expected some of adam"), (["--time-limit", "0"], "time_limit=0.0: expected")],
)
def test_bad_arguments(options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all_benchmarks.main(["--out", str(tmp_path / "out"), *options]) == EXIT_USAGE
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
