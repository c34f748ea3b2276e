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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import jobs as jobs_module
from benchmarks import sources
from benchmarks.jobs import (
    DONE,
    ENDS_VARIABLE,
    FAILED,
    NOT_HERE,
    RESULT_PATH,
    TIMED_OUT,
    Job,
    Results,
    run_jobs,
    unmet,
    with_numbers,
)
from superoffload.errors import ArgumentError
from tests.support.benchmark_jobs import Bench
from tests.support.checkout import ROOT

pytestmark = pytest.mark.in_turn("benchmark jobs")


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


def test_what_failed_keeps_all_that_it_printed(bench: Bench) -> None:
    jobs = bench.job("bad"), bench.job("chatty", keeps_output=True)
    bench.run(*jobs)
    bad, chatty = bench.report(*jobs)["rows"]
    assert "the first of many lines" in bad["output"] and bad["output"].count("another line") == 1000
    log = (bench.folder / "merged.log").read_text()
    assert "===== bad" in log and "the first of many lines" in log and "something is wrong" in log
    assert len(log) < 2 << 20 and "the first line\n" in log and "the last line" in log and "bytes cut out here" in log
    assert chatty["output"].endswith("measuring chatty\n") or "the last line" in chatty["output"]


def test_numbers_that_json_lacks_are_recorded_as_such(bench: Bench) -> None:
    """And the calls after that go on."""
    jobs = bench.job("not a number"), bench.job("two")
    assert bench.run(*jobs) == []
    result = bench.report(*jobs)["rows"][0]["result"]
    assert result == {"loss": "NaN", "losses": [1.0, "-Infinity"], "median": 2.5}
    restored = with_numbers(result)
    assert math.isnan(restored["loss"]) and restored["losses"] == [1.0, -math.inf] and restored["median"] == 2.5
    assert bench.run(*jobs, bench.job("three")) == []
    assert bench.ran == ["not", "a", "number", "two", "three"]


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


def test_a_job_that_takes_too_long_is_ended_and_shows_where_it_was(bench: Bench) -> None:
    jobs = bench.job("slow", seconds=5.0, takes=60.0), bench.job("next")
    began = time.monotonic()
    assert bench.run(*jobs) == []
    assert time.monotonic() - began < 45
    slow, after = bench.report(*jobs)["rows"]
    assert (slow["status"], slow["error"]) == (TIMED_OUT, "not ended within 5 s")
    assert "Current thread" in slow["output"] and 'File "<string>", line 6 in <module>' in slow["output"]
    assert "Current thread" in (bench.folder / "merged.log").read_text()
    assert after["status"] == DONE


def test_a_job_is_not_begun_with_less_time_left_than_it_needs(bench: Bench) -> None:
    """One behind it that needs less is; the next call does the rest, in order."""
    jobs = bench.job("long", seconds=90.0), bench.job("short", seconds=20.0), bench.job("long too", seconds=90.0)
    assert bench.run(*jobs, limit=60.0) == ["long", "long too"]
    assert bench.ran == ["short"]
    assert bench.run(*jobs, limit=200.0) == []
    assert bench.ran == ["short", "long", "long", "too"]


def test_a_job_that_the_end_of_the_call_cuts_short_is_begun_again(bench: Bench) -> None:
    jobs = bench.job("first"), bench.job("long", takes=60.0, seconds=90.0, needs=0.5), bench.job("last")
    bench.run(jobs[0])
    assert bench.run(*jobs, limit=2.5) == ["long", "last"]
    assert [row["key"] for row in bench.report(*jobs)["rows"]] == ["first"]
    before = len(bench.ran)
    assert bench.run(bench.job("first"), bench.job("long", needs=0.5), bench.job("last")) == []
    assert bench.ran[before:] == ["long", "last"]


# ---- preparations ----------------------------------------------------------------------------------------------------


def test_nothing_is_begun_that_comes_after_a_failed_preparation(bench: Bench) -> None:
    after = bench.job("two", after=("bad",))
    failing = bench.job("bad", prepares=True)
    assert bench.run(failing, after, bench.job("three")) == ["two"]
    assert unmet(after, [failing, after], bench.results()) == ["bad"]
    assert bench.run(failing, after, bench.job("three")) == ["two"]
    assert bench.ran == ["bad", "three", "bad"], "a preparation that failed is tried again"
    mended = bench.job("bad", settings={"name": "mended"}, prepares=True)
    mended = replace(mended, command=["mended" if word == "bad" else word for word in mended.command])
    assert bench.run(mended, after) == []
    assert bench.ran[3:] == ["mended", "two"]


def test_a_machine_that_was_started_anew_is_prepared_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, first = bench.job("prepare", prepares=True), bench.job("first", after=("prepare",))
    second = bench.job("second", after=("prepare",))
    assert bench.run(prepare, first) == []
    assert bench.run(prepare, first, second) == []
    assert bench.ran == ["prepare", "first", "second"]
    monkeypatch.setattr(jobs_module, "boot", lambda: "another")
    assert bench.run(prepare, first, second) == []
    assert bench.ran == ["prepare", "first", "second"], "nothing is left that it would be for"
    assert bench.run(prepare, first, second, bench.job("third", after=("prepare",))) == []
    assert bench.ran[3:] == ["prepare", "third"]


def test_a_job_may_leave_the_rest_to_another_call(bench: Bench) -> None:
    jobs = bench.job("unfinished", continues=True), bench.job("good")
    assert bench.run(*jobs) == ["unfinished"]
    assert [row["key"] for row in bench.report(*jobs)["rows"]] == ["good"]


def test_what_cannot_be_measured_here_is_listed_with_the_reason(bench: Bench) -> None:
    absent = bench.job("peer", absent="peer is not installed")
    bench.run(absent)
    (row,) = bench.report(absent)["rows"]
    assert (row["status"], row["error"], bench.ran) == (NOT_HERE, "peer is not installed", [])
    bench.run(bench.job("peer"))  # it is installed by now
    assert bench.ran == ["peer"]


def test_other_settings_or_other_sources_are_measured_anew(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run(bench.job("one", settings={"numel": 1}))
    bench.run(bench.job("one", settings={"numel": 2}))
    assert bench.ran == ["one"] * 2
    monkeypatch.setattr(jobs_module, "commit", lambda: "another")
    bench.run(bench.job("one", settings={"numel": 2}))
    assert bench.ran == ["one"] * 2, "a commit that changes no source changes no result"
    monkeypatch.setattr(jobs_module, "digest_of", lambda parts: f"another {parts}")
    bench.run(bench.job("one", settings={"numel": 2}))
    assert bench.ran == ["one"] * 3


def test_the_digest_is_of_the_sources_that_were_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*parts: str) -> str:
        sources._digest.cache_clear()
        return sources.digest_of(parts)

    monkeypatch.setattr(sources, "ROOT", tmp_path)
    for name in ("csrc/kernel.h", "package/a.py", "package/deep/b.py", "package/notes.md", "other/c.py", "setup.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    before = digest("csrc", "package", "setup.py")
    assert before == digest("setup.py", "package", "csrc") != digest("package", "setup.py")
    for name in ("other/c.py", "package/notes.md"):
        (tmp_path / name).write_text("changed")
    assert digest("csrc", "package", "setup.py") == before
    seen = {before}
    for name in ("csrc/kernel.h", "package/deep/b.py", "setup.py"):
        (tmp_path / name).write_text("changed")
        seen.add(digest("csrc", "package", "setup.py"))
    (tmp_path / "package/a.py").rename(tmp_path / "package/d.py")
    assert len(seen | {digest("csrc", "package", "setup.py")}) == 5


def test_results_of_another_machine_are_taken_over(bench: Bench, tmp_path: Path) -> None:
    """What travels between machines is one file; rows that nothing has asked for stay in it."""
    bench.run(bench.job("one"), bench.job("two"))
    other = Bench(tmp_path / "other")
    results = Results(other.folder, "merged.json", earlier=bench.folder / "merged.json")
    assert run_jobs([other.job("two"), other.job("three")], results, 60.0, other.said.append) == []
    assert other.ran == ["three"]
    stored = json.loads((other.folder / "merged.json").read_text())
    assert [row["key"] for row in stored["rows"]] == ["one", "two", "three"]


def test_a_file_cut_short_is_measured_again(bench: Bench) -> None:
    bench.run(bench.job("one"))
    path = bench.folder / "merged.json"
    path.write_text(path.read_text()[:40])
    bench.run(bench.job("one"))
    assert bench.ran == ["one", "one"]


def test_a_killed_call_leaves_no_process_and_the_next_goes_on(bench: Bench, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from tests.support.benchmark_jobs import Bench
        bench = Bench(Path(sys.argv[1]))
        bench.run(bench.job("one"), bench.job("two", takes=120.0, seconds=200.0), limit=300.0)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        _wait_for(lambda: bench.ran == ["one", "two"])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _wait_for(lambda: not _running(str(bench.log)))
    stored = json.loads((bench.folder / "merged.json").read_text())
    assert [(row["key"], row["status"]) for row in stored["rows"]] == [("one", DONE)] and stored["machine"]["cpu"]
    assert "===== two" in (bench.folder / "merged.log").read_text()
    assert bench.run(bench.job("one"), bench.job("two", seconds=200.0), limit=300.0) == []
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


def test_two_calls_at_a_time_in_one_folder_are_refused(bench: Bench) -> None:
    """Each would write its own rows over those of the other."""
    bench.run(bench.job("one"))
    with bench.results().alone(), pytest.raises(ArgumentError, match=r"out=.*: another call is measuring into"):
        bench.run(bench.job("two"))
    assert bench.ran == ["one"] and bench.run(bench.job("two")) == []


def test_two_jobs_of_one_name_are_refused(bench: Bench) -> None:
    with pytest.raises(ArgumentError, match="one occurs twice"):
        bench.run(bench.job("one"), bench.job("one"))


def test_a_job_is_told_when_it_will_be_ended(tmp_path: Path) -> None:
    """By the call's own limit where that comes first."""
    code = f"import json, os, sys; json.dump(float(os.environ['{ENDS_VARIABLE}']), open(sys.argv[1], 'w'))"
    jobs = [
        Job(f"{seconds:g} s", [sys.executable, "-S", "-c", code, RESULT_PATH], {}, seconds, needs=5.0)
        for seconds in (20.0, 90.0)
    ]
    results = Results(tmp_path, "merged.json")
    began = time.monotonic()
    assert run_jobs(jobs, results, 50.0, print) == []
    took = time.monotonic() - began
    short, long = (row["result"] - began for row in results.rows(jobs))
    assert 20.0 <= short <= 20.0 + took and 50.0 <= long <= 50.0 + took
