"""Jobs: every one is run once, whatever cut a call short; how each ended is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from superoffload.benchmarking import jobs as jobs_module
from superoffload.benchmarking.jobs import DONE, FAILED, NOT_HERE, RESULT_PATH, TIMED_OUT, Job, Results, run_jobs
from superoffload.errors import ArgumentError

# Appends its name to a file, so that it shows how often it ran, and writes a result.
SCRIPT = """
import json, os, sys, time
name, log, path, seconds = sys.argv[1:]
with open(log, "a") as file:
    file.write(name + "\\n")
time.sleep(float(seconds))
print("measuring", name)
if name == "bad":
    sys.exit("something is wrong")
if name == "unfinished":
    sys.exit(3)
if name != "silent":
    json.dump({"name": name, "variable": os.environ.get("A_VARIABLE")}, open(path, "w"))
"""


class Bench:
    """Jobs that write down when they run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "out", folder / "log"
        self.said: list[str] = []

    def job(self, name: str, *, seconds: float = 30.0, takes: float = 0.0, **more: Any) -> Job:
        command = [sys.executable, "-c", SCRIPT, name, str(self.log), RESULT_PATH, str(takes)]
        settings: Mapping[str, Any] = more.pop("settings", {"name": name})
        return Job(name, command, settings, seconds, **more)

    def run(self, *jobs: Job, limit: float = 60.0, **options: Any) -> list[str]:
        left = run_jobs(jobs, self.results(), limit, self.said.append, **options)
        return [job.key for job in left]

    def results(self) -> Results:
        return Results(self.folder, "merged.json")

    def report(self, *jobs: Job) -> dict[str, Any]:
        return self.results().merge(jobs, {"command": ["test"]})

    @property
    def ran(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_each_job_runs_once_and_is_reported(bench: Bench) -> None:
    jobs = bench.job("one", environment={"A_VARIABLE": "yes"}), bench.job("two", keeps_output=True)
    assert bench.run(*jobs) == []
    assert bench.run(*jobs) == []
    assert bench.ran == ["one", "two"]
    report = bench.report(*jobs)
    assert json.loads((bench.folder / "merged.json").read_text()) == report
    one, two = report["rows"]
    assert (one["status"], one["result"]) == (DONE, {"name": "one", "variable": "yes"})
    assert two["output"] == "measuring two\n" and "output" not in one
    assert report["machine"]["cpu"] and report["commit"] and report["versions"]["torch"]


def test_what_failed_is_kept_and_retried_only_when_asked(bench: Bench) -> None:
    jobs = bench.job("bad"), bench.job("silent"), bench.job("good")
    for _ in range(2):
        assert bench.run(*jobs) == []
    assert bench.ran == ["bad", "silent", "good"]
    bad, silent, good = bench.report(*jobs)["rows"]
    assert (bad["status"], silent["status"], good["status"]) == (FAILED, FAILED, DONE)
    assert bad["error"] == "exit status 1: something is wrong"
    assert silent["error"] == "it wrote no result: measuring silent"
    bench.run(*jobs, retry=True)
    assert bench.ran[3:] == ["bad", "silent"]


def test_a_job_that_takes_too_long_is_ended(bench: Bench) -> None:
    jobs = bench.job("slow", seconds=0.5, takes=60.0), bench.job("next")
    began = time.monotonic()
    assert bench.run(*jobs) == []
    assert time.monotonic() - began < 45
    slow, after = bench.report(*jobs)["rows"]
    assert (slow["status"], slow["error"]) == (TIMED_OUT, "not ended within 0.5 s")
    assert after["status"] == DONE


def test_the_call_ends_within_its_limit_and_the_next_one_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_LEAST_SECONDS", 0.1)  # what a job must have to be started
    jobs = bench.job("first"), bench.job("long", takes=60.0, seconds=90.0), bench.job("last")
    bench.run(jobs[0])
    assert bench.run(*jobs, limit=1.5) == ["long", "last"], "in order: what was cut short comes first"
    assert [row["key"] for row in bench.report(*jobs)["rows"]] == ["first"]
    before = len(bench.ran)
    assert bench.ran in (["first", "long"], ["first"]), "on a busy machine it may be cut short before it says its name"
    again = bench.job("first"), bench.job("long"), bench.job("last")
    assert bench.run(*again) == []
    assert bench.ran[before:] == ["long", "last"]


def test_a_job_may_leave_the_rest_to_another_call(bench: Bench) -> None:
    jobs = bench.job("unfinished", continues=True), bench.job("good")
    assert bench.run(*jobs) == ["unfinished", "good"]
    assert bench.report(*jobs)["rows"] == []


def test_what_cannot_be_measured_here_is_listed_with_the_reason(bench: Bench) -> None:
    absent = bench.job("peer", absent="peer is not installed")
    bench.run(absent)
    (row,) = bench.report(absent)["rows"]
    assert (row["status"], row["error"], bench.ran) == (NOT_HERE, "peer is not installed", [])
    bench.run(bench.job("peer"))  # it is installed by now
    assert bench.ran == ["peer"]


def test_other_settings_or_another_commit_are_measured_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run(bench.job("one", settings={"numel": 1}))
    bench.run(bench.job("one", settings={"numel": 2}))
    assert bench.ran == ["one"] * 2
    monkeypatch.setattr(jobs_module, "commit", lambda: "another")
    bench.run(bench.job("one", settings={"numel": 2}))
    assert bench.ran == ["one"] * 3


def test_the_merged_file_alone_continues(bench: Bench) -> None:
    """What travels between machines is one file."""
    jobs = bench.job("one"), bench.job("two")
    bench.run(*jobs)
    bench.report(*jobs)
    for path in (bench.folder / "rows").iterdir():
        path.unlink()
    assert bench.run(*jobs) == []
    assert bench.ran == ["one", "two"]


def test_a_result_cut_short_is_measured_again(bench: Bench) -> None:
    bench.run(bench.job("one"))
    (path,) = (bench.folder / "rows").iterdir()
    path.write_text(path.read_text()[:40])
    bench.run(bench.job("one"))
    assert bench.ran == ["one", "one"]


def test_a_killed_call_leaves_no_process_and_the_next_goes_on(bench: Bench, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from tests.test_bench_jobs import Bench
        bench = Bench(Path(sys.argv[1]))
        bench.run(bench.job("one"), bench.job("two", takes=120.0, seconds=200.0))
        """
    )
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    try:
        _wait_for(lambda: bench.ran == ["one", "two"])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _wait_for(lambda: not _running(str(bench.log)))
    assert bench.run(bench.job("one"), bench.job("two", seconds=200.0)) == []
    assert bench.ran == ["one", "two", "two"]


def _wait_for(holds: Any, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def _running(argument: str) -> list[int]:
    """Processes other than this one with ``argument`` on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in words and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def test_two_jobs_of_one_name_are_refused(bench: Bench) -> None:
    with pytest.raises(ArgumentError, match="one is there twice"):
        bench.run(bench.job("one"), bench.job("one"))
