"""The GPU suite rehearsed: whatever ends a call, what was measured is kept, a table is printed, the next call goes on.

Most of it with canned results in place of the measurements; once with the real ones, over the stand-in for the driver,
in a copy of the sources without anything else, killed in the middle.
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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import extension
from benchmarks import jobs as jobs_module
from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import rows
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
if fault == "crashes":
    os.abort()
if fault == "fails":
    print("FAILED tests/gpu/test_it.py\\n" + 200 * "a line of its traceback\\n" + "1 failed, 2 passed")
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


def test_all_goes_well_however_often_the_time_is_over(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job takes 100 s of a clock of its own, so each call of 310 s ends somewhere else."""
    clock = SimpleNamespace(now=0.0)

    def say(line: str) -> None:
        print(line)
        if re.match(r"\[\d+/\d+\]", line):
            clock.now += 100.0

    status, printed = rehearsal.call("--time-limit", "20")
    assert status == LEFT and rehearsal.ran == [] and "a call needs 45 s at least" in printed
    monkeypatch.setattr(jobs_module, "time", SimpleNamespace(monotonic=lambda: clock.now, strftime=time.strftime))
    monkeypatch.setattr(suite, "say", say)
    for _ in range(10):
        before = len(rehearsal.ran)
        status, printed = rehearsal.call("--time-limit", "310")
        measured = [row for row in rehearsal.stored().values() if row["status"] != "not here"]
        assert len(measured) == len(rehearsal.ran) and "smoke: ok, arrivals by flag and event" in printed
        if status == 0:
            break
        assert status == LEFT and "the same command goes on" in printed and len(rehearsal.ran) > before
    assert status == 0
    assert "races, always, eager: 0 of 2 runs with delays differ" in printed and "link: down 50.0 GB/s" in printed
    assert "DeepSpeed SuperOffload" in printed and "needs a GPU" in printed
    ran = rehearsal.ran
    assert ran[:2] == ["smoke None None", "tests None None"] and len(ran) == len(set(ran))
    assert rehearsal.call()[0] == 0 and rehearsal.ran == ran, "nothing is measured twice"
    assert sorted(path.name for path in rehearsal.out.iterdir()) == ["gpu_suite.json", "gpu_suite.log"]


@pytest.mark.parametrize(
    ("fault", "key", "row_status", "status", "shown"),
    [
        (on("train", {"final_loss": float("nan")}, OURS), f"64 tokens, {OURS}", "done", 1, "nan"),
        (on("train", "crashes", OURS), f"64 tokens, {OURS}", "failed", 1, "exit status -6"),
        (on("train", {"out_of_memory": "too little"}, ALL_ON_DEVICE), f"64 tokens, {ALL_ON_DEVICE}", "done", 0, ""),
        (on("tests", "fails"), "tests", "failed", 1, "tests: failed: exit status 1: 1 failed, 2 passed"),
        (on("races", {"different_seeds": [1]}), "races, always, eager", "done", 1, "1 of 2 runs with delays differ"),
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
    if key == "tests":
        for text in (rehearsal.stored()["tests"]["output"], (rehearsal.out / "gpu_suite.log").read_text()):
            assert text.count("a line of its traceback") == 200 and "FAILED tests/gpu/test_it.py" in text
    before = len(rehearsal.ran)
    assert rehearsal.call()[0] == status and len(rehearsal.ran) == before
    rehearsal.fault = lambda what, values: None
    assert rehearsal.call("--retry")[0] == (0 if row_status != "done" else status)


def test_where_smoke_fails_nothing_else_is_tried(rehearsal: Rehearsal) -> None:
    rehearsal.fault = on("smoke", "fails")
    status, printed = rehearsal.call()
    assert status == 1 and rehearsal.ran == ["smoke None None"]
    assert "a line of its traceback" in printed and "wait for smoke, which failed" in printed
    rehearsal.fault = lambda what, values: None
    assert rehearsal.call("--contestants", OURS)[0] == 0, "it is tried again without being asked to"


# ---- the real measurements, over the stand-in ------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The sources as they travel, without git, with the extension built before and the stand-in's libraries."""
    folder = tmp_path / "checkout"
    shown = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if shown.returncode:
        pytest.skip("needs a git checkout, whose files are copied")
    names = [name for name in shown.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    emulated = library_path().parent.rglob("*emulated_kernels*")
    for path in [*(ROOT / name for name in names), build(), LIBRARY, *emulated]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)  # with its time, or it would be compiled again
    (folder / "build" / "gpu").mkdir()
    shutil.copy(real_extension(), folder / "build" / "gpu" / extension.prebuilt_name())
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    """run.sh with next to nothing in the environment."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "PYTHON": sys.executable}
    command = ["benchmarks/gpu_suite/run.sh", str(folder / "out"), "--device", "stand-in", "--toy"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.timeout(900)
def test_all_of_it_killed_once(copied: Path) -> None:
    results = copied / "out" / suite.NAME
    process = start(copied)
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(r"\[\d+/\d+\] link", line):
            process.send_signal(signal.SIGKILL)
    process.wait()
    (stored,) = json.loads(results.read_text())["rows"]
    assert stored["key"] == rows.SMOKE
    process = start(copied)
    text, _ = process.communicate()
    assert process.returncode == 0, text
    for words in ("the extension was built before", "smoke: ok, arrivals by flag and event", "toy sizes"):
        assert words in text
    report = json.loads(results.read_text())
    found = {row["key"]: row for row in report["rows"]}
    assert found[rows.SMOKE] == stored, "what was measured stays"
    assert report["commit"] == "unknown" and all(len(row["sources"]) == 16 for row in report["rows"])
    ours = found[f"64 tokens, {OURS}"]["result"]
    assert ours["stats"]["pinned_bytes"] > 0, "over the stand-in's link"
    files = [path for path in (copied / "out").rglob("*") if path.is_file()]
    assert len(files) <= 8 and all(path.parent == copied / "out" for path in files)
    assert sum(path.stat().st_size for path in files) < 16 << 20
    assert len(text[text.index("smoke: ok") :].encode()) < 4096
