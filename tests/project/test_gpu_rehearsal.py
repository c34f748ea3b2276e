"""The GPU suite rehearsed over the stand-in for the driver: in a copy of the sources alone, killed in the middle."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import rows
from benchmarks.gpu_suite.bare_machine import prebuilt_name
from benchmarks.gpu_suite.contestants import OURS
from superoffload import _native
from tests.support.checkout import ROOT
from tests.support.emulated_kernels import library_path
from tests.support.fake_cuda import build


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
    for path in [*(ROOT / name for name in names), build(), *emulated]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)  # with its time, or it would be compiled again
    (folder / "build" / "gpu").mkdir()
    shutil.copy(_native.__file__, folder / "build" / "gpu" / prebuilt_name())
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    """run.sh with next to nothing in the environment."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "PYTHON": sys.executable}
    command = ["benchmarks/gpu_suite/run.sh", str(folder / "out"), "--device", "stand-in", "--toy"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.in_turn("gpu rehearsal")
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
