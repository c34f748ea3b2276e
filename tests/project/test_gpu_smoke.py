"""What a bare GPU machine meets first: smoke, compute-sanitizer, what was carried there, wheels."""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import commands
from benchmarks.gpu_suite import smoke
from benchmarks.gpu_suite.__main__ import NAME, parse
from benchmarks.gpu_suite.__main__ import main as gpu_suite
from benchmarks.gpu_suite.devices import Cuda

OURS_HALF, OURS_EAGER = "ours, 50 % clipped", "ours, eager"


def test_smoke_compares_bits() -> None:
    from benchmarks.gpu_suite.given_gradients import Run

    digests = [{"master": "a", "published": "b"}, {"master": "c", "published": "d"}]
    expected = Run(digests=digests, norms=[1.0, 2.0], parameters=[torch.ones(3), torch.ones(2)])
    assert smoke.differences(expected, expected) == []
    other = Run(
        digests=[digests[0], {"master": "x", "published": "d"}],
        norms=[1.5, 2.0],
        parameters=[torch.tensor([1.0, 2.0, 2.0]), torch.ones(2)],
    )
    found = smoke.differences(other, expected)
    assert found == [
        "step 0: no part of the state differs, norm 1.5 instead of 1.0",
        "step 1: master differs, norm 2.0 instead of 2.0",
        "parameter 0: 2 of 3 elements differ",
    ]


def test_smoke_is_not_content_with_a_link_that_has_given_something_up() -> None:
    assert smoke.missing({"kernels": True, "pinned": True}) == []
    assert smoke.missing({"kernels": False, "pinned": True}) == ["kernels could not be compiled or loaded"]
    assert len(smoke.missing({"kernels": False, "pinned": False})) == 2


@pytest.mark.parametrize(
    ("status", "said", "wrong", "unchecked"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", [], None),
        (
            99,
            "========= Invalid __global__ read\n========= ERROR SUMMARY: 2 errors",
            ["2 errors; the log has them"],
            None,
        ),
        (1, "========= ERROR SUMMARY: 0 errors", [], "what it ran ended with 1; the log has why"),
        (1, "========= Error: Device not supported.", [], "Error: Device not supported."),
        (
            99,
            "========= Error: Device not supported.\n========= ERROR SUMMARY: 1 error",
            [],
            "Device not supported; the log has all of it",
        ),
        (
            99,
            "========= Internal Sanitizer Error\n========= Invalid read\n========= ERROR SUMMARY: 2 errors",
            ["2 errors; the log has them"],
            None,
        ),
        (127, "", [], "it ended with 127 and no summary"),
        (None, "", [], "not ended within 120 s"),
    ],
)
def test_what_compute_sanitizer_says(status: int | None, said: str, wrong: list[str], unchecked: str | None) -> None:
    found = smoke.judged(status, said, 120.0)
    assert found["wrong"] == wrong and found.get("unchecked") == unchecked


def test_smoke_makes_its_own_links_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one: the options that the link would get."""
    from superoffload.links.cuda import start
    from superoffload.links.cuda.link import CudaOptions

    monkeypatch.setattr(start, "options_for", lambda device, *, keep_grads: CudaOptions(keep_grads=keep_grads))
    device = object.__new__(Cuda)

    def options() -> Any:
        made: Any = start.options_for
        return made(device, keep_grads=True)

    with device.links(arrival_flag=False):
        assert options() == CudaOptions(keep_grads=True, arrival_flag=False)
    assert options() == CudaOptions(keep_grads=True)


def test_what_was_carried_is_used_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "CARRIED", tmp_path)
    for device, there in (("cuda", False), ("cpu", True), ("cuda", True)):
        if there:
            (tmp_path / "wheels").mkdir(exist_ok=True)
            (tmp_path / NAME).touch()
        args = parse(["--device", device, "--toy", "--out", "out"])
        commands.check_common(args, NAME)
        expected = (str(tmp_path / NAME), str(tmp_path / "wheels")) if there and device == "cuda" else (None, None)
        assert (args.resume, args.wheels) == expected


def test_a_broken_wheel_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    args = parse(["--device", "cpu", "--toy", "--out", str(tmp_path / "out"), "--wheels", str(wheels)])
    assert commands.prepare(args, tmp_path / "log", builds=False) is None
    assert "1 wheels installed; not installed: broken-1.0-py3-none-any.whl" in capsys.readouterr().out
    site, before = os.environ["PYTHONPATH"].split(os.pathsep)
    assert before == "/before" and Path(site, "whole.py").is_file() and sys.path[0] == site
    assert "MemTotal" in (tmp_path / "log").read_text(), "what the machine is"


def test_threads_of_an_image_do_not_bound_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = parse(["--device", "cpu", "--toy", "--out", str(tmp_path / "out")])
    assert commands.prepare(args, tmp_path / "log", builds=False) is None
    assert "OMP_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS=1" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["a dead link", "a file"])
def test_a_folder_that_cannot_be_made_is_named(there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    if there == "a file":
        out.touch()
    else:
        out.symlink_to(tmp_path / "gone")
    assert gpu_suite(["--device", "cpu", "--toy", "--out", str(out)]) == 1
    assert f"{out}: cannot be written (File exists)" in capsys.readouterr().err
