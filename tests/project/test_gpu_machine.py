"""What the GPU suite does about a bare machine: an extension, wheels, smoke, tests that break the device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import commands, extension
from benchmarks.gpu_suite import gpu_tests, smoke
from benchmarks.gpu_suite.__main__ import NAME, parse
from benchmarks.gpu_suite.given_gradients import Run
from tests.support.checkout import ROOT
from tests.support.native_extension import real_extension

BROKEN = """
import pytest, torch
from tests.gpu.conftest import device_still_works

pytestmark = pytest.mark.gpu
state = {"broken": False}

def synchronize():
    if state["broken"]:
        raise RuntimeError("an illegal memory access was encountered")

torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = synchronize

def test_before(): synchronize()
def test_that_breaks_the_device(): state["broken"] = True
def test_after_it(): synchronize()
"""


def test_a_test_that_breaks_the_device_costs_no_other(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="needs pytest-xdist: pip install pytest-xdist")
    file = tmp_path / "test_broken.py"
    file.write_text(BROKEN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    words = [str(file) if word == "tests/gpu" else word for word in gpu_tests.command([])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert shown.returncode == 1, shown.stdout
    for name in ("test_before", "test_after_it"):
        assert re.search(rf"PASSED \S+::{name}\b", shown.stdout), shown.stdout
    assert "crashed while running" in shown.stdout
    assert "has broken the device: an illegal memory access" in shown.stderr


# ---- what travels there ----------------------------------------------------------------------------------------------


def test_what_was_carried_is_used_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "CARRIED", tmp_path)
    (tmp_path / "wheels").mkdir()
    (tmp_path / NAME).touch()
    for device, expected in (("cpu", (None, None)), ("cuda", (str(tmp_path / NAME), str(tmp_path / "wheels")))):
        args = parse(["--device", device, "--toy", "--out", "out"])
        commands.check_common(args, NAME)
        assert (args.resume, args.wheels) == expected


def test_a_broken_wheel_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And threads that an image has set do not bound what is measured."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "whole-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("whole.py", "value = 1")
        wheel.writestr("whole-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: whole\nVersion: 1.0\n")
        wheel.writestr("whole-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("whole-1.0.dist-info/RECORD", "")
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(b"not a wheel")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    args = parse(["--device", "cpu", "--toy", "--out", str(tmp_path / "out"), "--wheels", str(wheels)])
    assert commands.prepare(args, tmp_path / "log", builds=False) is None
    assert "1 wheels installed; not installed: broken-1.0-py3-none-any.whl" in capsys.readouterr().out
    site, before = os.environ["PYTHONPATH"].split(os.pathsep)
    assert before == "/before" and Path(site, "whole.py").is_file() and sys.path[0] == site
    assert "MemTotal" in (tmp_path / "log").read_text(), "what the machine is"
    assert "OMP_NUM_THREADS" not in os.environ


# ---- an extension that was built before, or there --------------------------------------------------------------------


class Bare:
    """benchmarks.extension in a folder with an empty package."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.prebuilt = folder, folder / "build" / "gpu"
        (folder / "superoffload").mkdir()
        (folder / "superoffload" / "__init__.py").touch()
        self.prebuilt.mkdir(parents=True)
        self.ready = self.prebuilt / extension.prebuilt_name()
        self.installed = folder / "superoffload" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        monkeypatch.setattr(extension, "ROOT", folder)

    def provide(self, setup_py: str) -> str:
        (self.root / "setup.py").write_text(setup_py)
        return extension.provide(self.root / "log", self.root / "back", self.prebuilt)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bare:
    return Bare(tmp_path, monkeypatch)


def test_one_that_cannot_be_imported_is_built_and_serves_the_next_machine(bare: Bare) -> None:
    bare.ready.write_bytes(b"\x7fELF of another processor")
    said = bare.provide(f"import shutil; shutil.copy({str(real_extension())!r}, {str(bare.installed)!r})")
    assert "cannot be imported here" in said and "was built here" in said
    (kept,) = (bare.root / "back").iterdir()
    assert kept.name == bare.ready.name
    shutil.copy(kept, bare.ready)
    assert "was built before" in bare.provide("raise SystemExit('it is there')")
    assert bare.installed.read_bytes() == bare.ready.read_bytes()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit('no compiler')", "(?s)ended with 1.*no compiler"),
        ("print('nothing is built')", "cannot be imported"),
        ("import time; time.sleep(600)", "not built within 0.5 s"),
    ],
)
def test_where_none_can_be_had_the_error_says_why(
    script: str, said: str, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that cannot be imported does not stay."""
    if "sleep" in script:
        monkeypatch.setattr(extension, "BUILD_SECONDS", 0.5)
    bare.ready.write_bytes(b"\x7fELF of another processor")
    with pytest.raises(extension.BuildError, match=said):
        bare.provide(script)
    assert not bare.installed.exists()


# ---- smoke -----------------------------------------------------------------------------------------------------------


def test_smoke_compares_bits_and_wants_the_whole_link() -> None:
    digests = [{"master": "a", "published": "b"}, {"master": "c", "published": "d"}]
    expected = Run(digests=digests, norms=[1.0, 2.0], parameters=[torch.ones(3), torch.ones(2)])
    assert smoke.differences(expected, expected) == []
    other = Run(
        digests=[digests[0], {"master": "x", "published": "d"}],
        norms=[1.5, 2.0],
        parameters=[torch.tensor([1.0, 2.0, 2.0]), torch.ones(2)],
    )
    assert smoke.differences(other, expected) == [
        "step 0: no part of the state differs, norm 1.5 instead of 1.0",
        "step 1: master differs, norm 2.0 instead of 2.0",
        "parameter 0: 2 of 3 elements differ",
    ]
    assert smoke.missing({"kernels": True, "pinned": True}) == []
    assert len(smoke.missing({"kernels": False, "pinned": False})) == 2


@pytest.mark.parametrize(
    ("status", "said", "wrong", "unchecked"),
    [
        (99, "Internal Sanitizer Error\nInvalid read\nERROR SUMMARY: 2 errors", ["2 errors; the log has them"], None),
        (1, "ERROR SUMMARY: 0 errors", [], "what it ran ended with 1; the log has why"),
        (99, "Error: Device not supported.\nERROR SUMMARY: 1 error", [], "Device not supported; the log has all of it"),
        (None, "", [], "not ended within 120 s"),
    ],
)
def test_what_compute_sanitizer_says(status: int | None, said: str, wrong: list[str], unchecked: str | None) -> None:
    lines = "\n".join(f"========= {line}" for line in said.split("\n") if line)
    found = smoke.judged(status, lines, 120.0)
    assert found["wrong"] == wrong and found.get("unchecked") == unchecked
