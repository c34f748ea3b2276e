"""The GPU suite rehearsed: whatever ends a call, what was measured is kept, a table is printed, the next call goes on.

Most of it with canned results in place of the measurements, killed at every job; once the real ones, over the stand-in
for the driver, in a copy of the sources without anything else, killed in every phase.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import extension
from benchmarks import jobs as jobs_module
from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import publish, rows
from benchmarks.gpu_suite.contestants import ALL_ON_DEVICE, OURS
from benchmarks.jobs import LEFT
from tests.support.checkout import ROOT
from tests.support.emulated_kernels import library_path
from tests.support.fake_cuda import LIBRARY, build
from tests.support.native_extension import real_extension

# ---- with canned results ---------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys, time
result, fault, path, log, key = sys.argv[1:]
open(log, "a").write(key + "\\n")
print("working on", key)
if fault == "hangs":
    time.sleep(60)
if fault == "crashes":
    os.abort()
if fault == "fails":
    print("FAILED tests/gpu/test_it.py\\n" + 200 * "a line of its traceback\\n" + "1 failed, 2 passed")
if fault != "writes nothing":
    open(path, "w").write(result)
sys.exit(1 if fault == "fails" else 0)
"""
TIMES = {
    "seconds_median": 0.3,
    "tokens_per_second": 9.0,
    "final_loss": 1.0,
    "bare_seconds": 0.1,
    "host_peak_resident_bytes": 1 << 30,
}
RESULTS: dict[str, dict[str, Any]] = {
    "smoke": {"device": "cpu", "ways": {"flag": {"uses_flag": True}, "event": {}}, "wrong": []},
    "link": {"down_gb_per_s": 50.0, "up_gb_per_s": 40.0, "both_gb_per_s": 20.0, "device": "cpu"},
    "adam": {"threads": 2, "step_seconds_per_param": 1e-9, "by_threads": {"2": 1e-9}},
    "pack": {"cpu kernel_of_copy": 0.9, "missing_ways": {}},
    "train": {"parameters": 10**9, "device": "cpu", "losses": [5.0], "timed": {}, **TIMES},
    "races": {"seeds": [0, 1], "different_seeds": []},
}
Fault = Callable[[str, dict[str, Any]], Any]


class Rehearsal:
    """The suite in this process, its measurements replaced; ``fault``: which of them go wrong, and how."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.out, self.log = folder / "out", folder / "ran"
        self.fault: Fault = lambda what, values: None
        self.capsys = capsys
        monkeypatch.setattr(rows, "child", self._command)
        monkeypatch.setattr(rows, "tests_command", lambda *options: self._command("tests", {}))

    def _command(self, what: str, values: dict[str, Any]) -> list[str]:
        fault = self.fault(what, values)
        result = {**RESULTS.get(what, {}), **(fault if isinstance(fault, dict) else {})}
        key = " ".join([what, *map(str, (values.get("contestant"), values.get("delivery")))])
        words = [json.dumps(result), fault if isinstance(fault, str) else "", jobs_module.RESULT_PATH]
        return [sys.executable, "-S", "-c", SCRIPT, *words, str(self.log), key]

    def call(self, *options: str) -> tuple[int, str]:
        status = suite.main(["--device", "cpu", "--toy", "--out", str(self.out), "--slot", "second", *options])
        return status, self.capsys.readouterr().out

    @property
    def ran(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def stored(self) -> dict[str, dict[str, Any]]:
        report = json.loads((self.out / suite.NAME).read_text())
        return {row["key"]: row for row in report["rows"]}


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rehearsal:
    return Rehearsal(tmp_path, monkeypatch, capsys)


def on(what: str, fault: Any, contestant: str | None = None) -> Fault:
    return lambda one, values: fault if one == what and contestant in (None, values.get("contestant")) else None


def test_all_goes_well(rehearsal: Rehearsal) -> None:
    status, printed = rehearsal.call()
    assert status == 0
    ran = rehearsal.ran
    assert ran[:2] == ["smoke None None", "tests None None"] and len(ran) == len(set(ran))
    assert (
        "smoke: ok, arrivals by flag and event" in printed
        and "races, always, eager: 0 of 2 runs with delays differ" in printed
    )
    assert "link: down 50.0 GB/s" in printed and "DeepSpeed SuperOffload" in printed and "needs a GPU" in printed
    assert rehearsal.call()[0] == 0 and rehearsal.ran == ran, "nothing is measured twice"
    assert sorted(path.name for path in rehearsal.out.iterdir()) == ["gpu_suite.json", "gpu_suite.log"]


def test_a_time_limit_may_strike_anywhere(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job takes 100 s of a clock of its own, so each call of 210 s ends somewhere else."""
    clock = SimpleNamespace(now=0.0)
    module = SimpleNamespace(monotonic=lambda: clock.now, strftime=time.strftime)

    def say(line: str) -> None:
        print(line)
        if re.match(r"\[\d+/\d+\]", line):
            clock.now += 100.0

    monkeypatch.setattr(jobs_module, "time", module)
    monkeypatch.setattr(suite, "say", say)
    statuses = []
    for _ in range(10):
        before = len(rehearsal.ran)
        status, printed = rehearsal.call("--time-limit", "210")
        statuses.append(status)
        measured = [row for row in rehearsal.stored().values() if row["status"] != "not here"]
        assert len(measured) == len(rehearsal.ran) and "smoke: ok" in printed
        if status == 0:
            break
        assert status == LEFT and "the same command goes on" in printed and len(rehearsal.ran) > before
    assert statuses[-1] == 0 and len(statuses) >= 4
    assert len(rehearsal.ran) == len(set(rehearsal.ran))


def test_a_kill_may_strike_when_any_job_begins(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forked process each time; what was measured stays, and the next call goes on with the job that was cut."""

    def say(line: str) -> None:
        job = re.match(r"\[\d+/\d+\] (.*)", line)
        if job is not None and job[1] not in begun:
            (rehearsal.out / "begun").write_text("\n".join([*begun, job[1]]))
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(suite, "say", say)
    begun: list[str] = []
    for count in range(30):
        child = os.fork()
        if child == 0:
            os._exit(rehearsal.call()[0])
        _, how = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(how) == 0:
            break
        assert os.waitstatus_to_exitcode(how) == -signal.SIGKILL
        begun = (rehearsal.out / "begun").read_text().split("\n")
        assert len(begun) == count + 1
        if count:
            measured = [row["status"] for key, row in rehearsal.stored().items() if key in begun]
            assert measured == ["done"] * count, "all but the one that was killed"
    assert len(begun) > 8 and set(begun) <= set(rehearsal.stored())
    assert len(rehearsal.ran) == len(set(rehearsal.ran)) == len(begun)


def test_a_limit_too_short_for_anything_says_what_is_needed(rehearsal: Rehearsal) -> None:
    status, printed = rehearsal.call("--time-limit", "20")
    assert status == LEFT and rehearsal.ran == [] and "a call needs 45 s at least" in printed


@pytest.mark.parametrize(
    ("fault", "key", "row_status", "status", "shown"),
    [
        (on("train", {"final_loss": float("nan")}, OURS), f"64 tokens, {OURS}", "done", 1, "nan"),
        (on("train", {"final_loss": float("nan")}, ALL_ON_DEVICE), f"64 tokens, {ALL_ON_DEVICE}", "done", 0, "nan"),
        (on("train", "crashes", OURS), f"64 tokens, {OURS}", "failed", 1, "exit status -6"),
        (on("train", {"out_of_memory": "too little"}, ALL_ON_DEVICE), f"64 tokens, {ALL_ON_DEVICE}", "done", 0, ""),
        (on("tests", "fails"), "tests", "failed", 1, "tests: failed: exit status 1: 1 failed, 2 passed"),
        (on("races", "crashes"), "races, always, eager", "failed", 1, "races, always, eager: failed: exit status -6"),
        (on("races", {"different_seeds": [1]}), "races, always, eager", "done", 1, "1 of 2 runs with delays differ"),
        (on("link", "writes nothing"), "link", "failed", 1, "link: failed: it wrote no result"),
    ],
)
def test_what_goes_wrong_is_recorded_and_the_rest_measured(
    fault: Fault, key: str, row_status: str, status: int, shown: str, rehearsal: Rehearsal
) -> None:
    rehearsal.fault = fault
    found, printed = rehearsal.call()
    assert (found, rehearsal.stored()[key]["status"]) == (status, row_status)
    assert shown in printed
    others = [row["status"] for name, row in rehearsal.stored().items() if name != key and not name.startswith("races")]
    assert set(others) == {"done", "not here"}
    before = len(rehearsal.ran)
    assert rehearsal.call()[0] == status and len(rehearsal.ran) == before
    rehearsal.fault = lambda what, values: None
    assert rehearsal.call("--retry")[0] == (0 if row_status != "done" else status)


def test_a_failed_test_keeps_all_it_said(rehearsal: Rehearsal) -> None:
    rehearsal.fault = on("tests", "fails")
    rehearsal.call()
    for text in (rehearsal.stored()["tests"]["output"], (rehearsal.out / "gpu_suite.log").read_text()):
        assert text.count("a line of its traceback") == 200 and "FAILED tests/gpu/test_it.py" in text


def test_a_job_that_hangs_is_ended_and_shows_where_it_was(rehearsal: Rehearsal) -> None:
    rehearsal.fault = on("train", "hangs", OURS)
    status, printed = rehearsal.call("--row-limit", "10")
    row = rehearsal.stored()[f"64 tokens, {OURS}"]
    assert (status, row["status"]) == (1, "timed out") and "not ended within 10 s" in printed
    assert "Current thread" in row["output"] and f"working on train {OURS}" in row["output"]


@pytest.mark.parametrize("fault", ["fails", "crashes", "writes nothing"])
def test_where_smoke_fails_nothing_else_is_tried(fault: str, rehearsal: Rehearsal) -> None:
    rehearsal.fault = on("smoke", fault)
    status, printed = rehearsal.call()
    assert status == 1 and rehearsal.ran == ["smoke None None"]
    said = "a line of its traceback" if fault == "fails" else "working on smoke"
    assert "smoke failed" in printed and said in printed and "wait for smoke, which failed" in printed
    rehearsal.fault = lambda what, values: None
    assert rehearsal.call()[0] == 0, "it is tried again without being asked to"


def test_rows_wait_for_a_kernel_that_does_not_compile(rehearsal: Rehearsal) -> None:
    rehearsal.fault = on("deepspeed kernel", "fails")
    chosen = ("--contestants", ALL_ON_DEVICE, "DeepSpeed ZeRO-Offload", "--without-tests")
    status, printed = rehearsal.call(*chosen)
    assert status == 1 and rehearsal.stored()[f"64 tokens, {ALL_ON_DEVICE}"]["status"] == "done"
    assert "1 of 4 wait for DeepSpeed's kernel, which failed" in printed
    rehearsal.fault = lambda what, values: None
    assert rehearsal.call(*chosen)[0] == 0


def test_what_came_back_goes_on_in_another_folder(rehearsal: Rehearsal, tmp_path: Path) -> None:
    rehearsal.call()
    before = len(rehearsal.ran)
    back = tmp_path / "back.json"
    (rehearsal.out / suite.NAME).rename(back)
    status, _ = rehearsal.call("--resume", str(back), "--slot", "first")
    assert status == 0 and "smoke None None" not in rehearsal.ran[before:]
    assert not [key for key in rehearsal.ran[before:] if key in rehearsal.ran[:before] and "train" in key]
    assert {"link", f"64 tokens, {OURS}", "64 tokens, ours, bf16 state"} <= set(rehearsal.stored())


def test_results_are_published_with_the_commit_of_their_sources(
    rehearsal: Rehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsal.call()
    source, target = rehearsal.out / suite.NAME, tmp_path / "results.json"
    report = json.loads(source.read_text())
    report["rows"][2]["sources"] = "0123456789abcdef"
    source.write_text(json.dumps(report))
    picture = tmp_path / "rows.png"
    publishing = ["--report", str(source), "--json", str(target), "--plot", str(picture)]
    monkeypatch.setattr(publish, "commit", lambda: "abc+changes")
    assert suite.main(publishing) == 2 and "commit first" in rehearsal.capsys.readouterr().err
    monkeypatch.setattr(publish, "commit", lambda: "abc")
    report["rows"] += [{**report["rows"][-1], "key": "one that failed", "status": "failed", "result": None}]
    source.write_text(json.dumps(report))
    assert suite.main(publishing) == 0 and picture.read_bytes().startswith(b"\x89PNG")
    printed = rehearsal.capsys.readouterr().out
    stale = report["rows"][2]["key"]
    assert f"1 of {len(report['rows'])} rows were made with other sources" in printed and stale in printed
    published = json.loads(target.read_text())
    assert published["commit"] == "abc" and {row["commit"] for row in published["rows"]} == {"abc"}
    assert stale not in {row["key"] for row in published["rows"]} and published["machine"] and published["targets"]
    assert suite.main(["--report", str(tmp_path / "none.json")]) == 2
    later = {**report, "rows": report["rows"][:1]}
    source.write_text(json.dumps(later))
    monkeypatch.setattr(publish, "commit", lambda: "def")
    assert suite.main(publishing) == 2 and "nothing to draw" in rehearsal.capsys.readouterr().err
    assert suite.main(publishing[:4]) == 0
    commits = [row["commit"] for row in json.loads(target.read_text())["rows"]]
    assert commits == ["def", *["abc"] * (len(published["rows"]) - 1)], "the others are as they were"


# ---- the real measurements, over the stand-in ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The sources as they travel, without git, with the extension built before and the stand-in's libraries."""
    folder = tmp_path_factory.mktemp("machine") / "checkout"
    shown = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if shown.returncode:
        pytest.skip("needs a git checkout, whose files are copied")
    names = [name for name in shown.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    for path in [*(ROOT / name for name in names), build(), *stand_in_files()]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)  # with its time, or it would be compiled again
    (folder / "build" / "gpu").mkdir()
    shutil.copy(real_extension(), folder / "build" / "gpu" / extension.prebuilt_name())
    yield folder
    shutil.rmtree(folder)


def stand_in_files() -> list[Path]:
    library = library_path()
    return [LIBRARY, *library.parent.rglob("*emulated_kernels*")]


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """run.sh with next to nothing in the environment."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "PYTHON": sys.executable}
    command = ["benchmarks/gpu_suite/run.sh", str(folder / "out"), "--device", "stand-in", "--toy", *options]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


PHASES = ("smoke", "link", f"64 tokens, {OURS}")


@pytest.mark.timeout(900)
def test_all_of_it_killed_in_every_phase(copied: Path) -> None:
    """Each call is killed when it begins a phase for the first time, until nothing is left."""
    begun: list[str] = []
    stored: dict[str, Any] = {}
    for _ in range(len(PHASES) + 1):
        process = start(copied)
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            job = re.match(r"\[\d+/\d+\] (.*)", line)
            if job is not None and job[1] in PHASES and job[1] not in begun:
                begun.append(job[1])
                process.send_signal(signal.SIGKILL)
                break
        else:
            break
        process.stdout.close()
        process.wait()
        if (copied / "out" / suite.NAME).exists():
            now = {row["key"]: row for row in json.loads((copied / "out" / suite.NAME).read_text())["rows"]}
            assert {key: now[key] for key in stored} == stored, "what was measured stays"
            assert [key for key in begun[:-1] if key not in now] == []
            stored = now
    assert process.wait() == 0, "".join(printed)
    text = "".join(printed)
    assert (
        "the extension was built before" in text
        and "smoke: ok, arrivals by flag and event" in text
        and "toy sizes" in text
    )
    assert begun == list(PHASES)
    report = json.loads((copied / "out" / suite.NAME).read_text())
    assert report["commit"] == "unknown" and all(len(row["sources"]) == 16 for row in report["rows"])
    ours = next(row["result"] for row in report["rows"] if row["key"] == f"64 tokens, {OURS}")
    assert ours["stats"]["pinned_bytes"] > 0, "over the stand-in's link"
    files = [path for path in (copied / "out").rglob("*") if path.is_file()]
    assert len(files) <= 8 and all(path.parent == copied / "out" for path in files)
    assert sum(path.stat().st_size for path in files) < 16 << 20
    table = text[text.index("smoke: ok") :]
    assert len(table.encode()) < 4096
