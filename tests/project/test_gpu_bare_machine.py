"""A machine that starts bare: an extension built before or there, and GPU tests of which none costs the others."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from benchmarks import extension
from benchmarks.gpu_suite import gpu_tests
from tests.support.checkout import ROOT
from tests.support.native_extension import real_extension

BROKEN = """
import pytest, time, torch
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
def test_that_hangs(): time.sleep(100)
def test_after_that_one(): synchronize()
"""


def test_a_test_that_breaks_the_device_or_hangs_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist", reason="needs pytest-xdist: pip install pytest-xdist")
    file = tmp_path / "test_broken.py"
    file.write_text(BROKEN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    monkeypatch.setattr(gpu_tests, "_SECONDS_PER_TEST", 6)
    words = [str(file) if word == "tests/gpu" else word for word in gpu_tests.command([])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert shown.returncode == 1, shown.stdout
    for name in ("test_before", "test_after_it", "test_after_that_one"):
        assert re.search(rf"PASSED \S+::{name}\b", shown.stdout), shown.stdout
    assert shown.stdout.count("crashed while running") >= 2
    assert "has broken the device: an illegal memory access" in shown.stderr
    assert "Timeout (0:00:04" in shown.stderr and "in test_that_hangs" in shown.stderr, "where it was"


class Bare:
    """benchmarks.extension in a folder with an empty package."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.prebuilt, self.log = folder, folder / "build" / "gpu", folder / "log"
        (folder / "superoffload").mkdir()
        (folder / "superoffload" / "__init__.py").touch()
        self.prebuilt.mkdir(parents=True)
        self.ready = self.prebuilt / extension.prebuilt_name()
        self.installed = folder / "superoffload" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
        monkeypatch.setattr(extension, "ROOT", folder)

    def setup_py(self, script: str) -> None:
        (self.root / "setup.py").write_text(script)

    def provide(self, keep_in: Path | None = None) -> str:
        return extension.provide(self.log, keep_in, self.prebuilt)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bare:
    return Bare(tmp_path, monkeypatch)


def test_an_extension_that_was_built_before_is_used(bare: Bare) -> None:
    shutil.copy(real_extension(), bare.ready)
    assert "was built before" in bare.provide()
    assert bare.installed.read_bytes() == bare.ready.read_bytes() and not bare.log.exists()


def test_one_that_cannot_be_imported_is_built(bare: Bare, tmp_path: Path) -> None:
    bare.ready.write_bytes(b"\x7fELF of another processor")
    bare.setup_py(f"import shutil; shutil.copy({str(real_extension())!r}, {str(bare.installed)!r})")
    said = bare.provide(keep_in=tmp_path / "back")
    assert "cannot be imported here" in said and "was built here" in said
    (kept,) = (tmp_path / "back").iterdir()
    assert kept.name == bare.ready.name
    shutil.copy(kept, bare.ready)
    assert "was built before" in bare.provide(), "what comes back serves the next machine"


def test_one_that_cannot_be_imported_does_not_stay_where_no_other_can_be_built(bare: Bare) -> None:
    bare.ready.write_bytes(b"\x7fELF of another processor")
    bare.setup_py("raise SystemExit('no compiler')")
    with pytest.raises(extension.BuildError):
        bare.provide()
    assert not bare.installed.exists()


@pytest.mark.parametrize("script", ["raise SystemExit('no compiler')", "print('nothing is built')"])
def test_a_build_that_fails_says_why(script: str, bare: Bare) -> None:
    bare.setup_py(script)
    with pytest.raises(extension.BuildError, match=r"(?s)ended with 1.*no compiler|cannot be imported"):
        bare.provide()


def test_a_build_that_hangs_is_ended(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.setup_py("import time; time.sleep(60)")
    monkeypatch.setattr(extension, "BUILD_SECONDS", 0.5)
    with pytest.raises(extension.BuildError, match=r"not built within 0.5 s"):
        bare.provide()
