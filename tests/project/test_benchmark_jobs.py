"""Jobs: every one is run once, whatever cut a call short; how each ended is kept."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import jobs as jobs_module
from benchmarks.jobs import DONE, FAILED, NOT_HERE, TIMED_OUT, Results, run_jobs, with_numbers
from superoffload.errors import ArgumentError
from tests.support.benchmark_jobs import Bench
from tests.support.checkout import ROOT

pytestmark = pytest.mark.in_turn("benchmark jobs")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_each_job_runs_once_and_how_it_ended_is_kept(bench: Bench) -> None:
    names = ("one", "bad", "chatty", "silent", "not a number")
    jobs = [bench.job(name, environment={"A_VARIABLE": "yes"}, keeps_output=name == "chatty") for name in names]
    assert bench.run(*jobs) == [] == bench.run(*jobs)
    assert bench.ran == ["one", "bad", "chatty", "silent", "not", "a", "number"]
    report = bench.report(*jobs)
    assert json.loads((bench.folder / "merged.json").read_text()) == report and report["machine"]["cpu"]
    one, bad, chatty, silent, no_number = report["rows"]
    assert (one["status"], one["result"]) == (DONE, {"name": "one", "variable": "yes"}) and "output" not in one
    assert (bad["status"], bad["error"]) == (FAILED, "exit status 1: something is wrong")
    assert bad["output"].count("another line") == 1000 and "the last line" in chatty["output"]
    assert silent["error"] == "it wrote no result: measuring silent"
    assert no_number["result"]["losses"] == [1.0, "-Infinity"]
    assert math.isnan(with_numbers(no_number["result"])["loss"])
    log = (bench.folder / "merged.log").read_text()
    assert "the first of many lines" in log and "bytes cut out here" in log and len(log) < 2 << 20
    bench.run(*jobs, retry=True)
    assert bench.ran[7:] == ["bad", "silent"]


def test_a_job_is_given_no_more_time_than_it_may_take_and_the_call_has(bench: Bench) -> None:
    """One that takes too long shows where it was; one that the call cuts short, or cannot begin, is left."""
    slow, after = bench.job("slow", seconds=5.0, takes=600.0), bench.job("next")
    assert bench.run(slow, after) == []
    row, other = bench.report(slow, after)["rows"]
    assert (row["status"], row["error"], other["status"]) == (TIMED_OUT, "not ended within 5 s", DONE)
    assert 'File "<string>", line 6 in <module>' in row["output"]
    jobs = bench.job("cut", takes=600.0, seconds=900.0, needs=0.1), bench.job("long", seconds=90.0), bench.job("last")
    assert bench.run(*jobs, limit=1.0) == ["cut", "long", "last"]
    assert bench.report(*jobs)["rows"] == []
    assert bench.run(*jobs[1:], limit=60.0) == ["long"], "the one behind it needs less"


def test_preparations(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is begun after a failed one, which is tried again; on another machine all of them are."""
    after = bench.job("two", after=("bad",))
    jobs = bench.job("bad", prepares=True), after, bench.job("three")
    assert bench.run(*jobs) == ["two"] == bench.run(*jobs)
    assert bench.ran == ["bad", "three", "bad"]
    prepare, first = bench.job("prepare", prepares=True), bench.job("first", after=("prepare",))
    assert bench.run(prepare, first) == [] == bench.run(prepare, first)
    monkeypatch.setattr(jobs_module, "boot", lambda: "another")
    assert bench.run(prepare, first) == []
    assert bench.ran[3:] == ["prepare", "first"], "nothing is left that it would be for"
    assert bench.run(prepare, first, bench.job("third", after=("prepare",))) == []
    assert bench.ran[5:] == ["prepare", "third"]


def test_what_is_measured_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other settings or sources, after a file was cut short, and once it is possible at all."""
    absent = bench.job("one", absent="peer is not installed")
    bench.run(absent)
    (row,) = bench.report(absent)["rows"]
    assert (row["status"], row["error"], bench.ran) == (NOT_HERE, "peer is not installed", [])
    job = bench.job("one", settings={"numel": 2})
    for count, setting in enumerate([{"numel": 1}, {"numel": 2}, {"numel": 2}], 1):
        bench.run(bench.job("one", settings=setting))
        assert len(bench.ran) == min(count, 2)
    monkeypatch.setattr(jobs_module, "digest_of", lambda parts: f"another {parts}")
    bench.run(job)
    path = bench.folder / "merged.json"
    path.write_text(path.read_text()[:40])
    bench.run(job)
    assert bench.ran == ["one"] * 4


def test_results_of_another_machine_are_taken_over(bench: Bench, tmp_path: Path) -> None:
    """What travels between machines is one file; rows that nothing has asked for stay in it."""
    bench.run(bench.job("one"), bench.job("two"))
    other = Bench(tmp_path / "other")
    results = Results(other.folder, "merged.json", earlier=bench.folder / "merged.json")
    assert run_jobs([other.job("two"), other.job("three")], results, 60.0, other.said.append) == []
    assert other.ran == ["three"]
    stored = json.loads((other.folder / "merged.json").read_text())
    assert [row["key"] for row in stored["rows"]] == ["one", "two", "three"]


def test_a_killed_call_leaves_no_process_and_the_next_goes_on(bench: Bench, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from tests.support.benchmark_jobs import Bench
        bench = Bench(Path(sys.argv[1]))
        bench.run(bench.job("one"), bench.job("two", takes=600.0, seconds=900.0), limit=1000.0)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_for(lambda: bench.ran == ["one", "two"])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not is_running(str(bench.log)))
    stored = json.loads((bench.folder / "merged.json").read_text())
    assert [(row["key"], row["status"]) for row in stored["rows"]] == [("one", DONE)] and stored["machine"]["cpu"]
    assert "===== two" in (bench.folder / "merged.log").read_text()
    assert bench.run(bench.job("one"), bench.job("two")) == []
    assert bench.ran == ["one", "two", "two"]


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90.0
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def is_running(argument: str) -> bool:
    """Whether a process has ``argument`` on its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def test_refusals(bench: Bench) -> None:
    """Of two calls at a time in one folder: each would write its own rows over those of the other."""
    with bench.results().alone(), pytest.raises(ArgumentError, match=r"out=.*: another call is measuring into"):
        bench.run(bench.job("two"))
    with pytest.raises(ArgumentError, match="one occurs twice"):
        bench.run(bench.job("one"), bench.job("one"))
    assert bench.ran == []
