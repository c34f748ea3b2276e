"""The `superoffload` command: what all subcommands share."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from superoffload import __version__
from superoffload.errors import SuperOffloadError
from superoffload.tools.cli import COMMANDS, main
from superoffload.tools.output import write_json


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "^superoffload: error: interrupted$"),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines"),
            1,
            "memory: CUDA out of memory. Tried",
        ),
        (MemoryError(), 1, "not enough memory: an allocation failed"),
        (ModuleNotFoundError("no torch", name="torch"), 1, "torch is not installed, .* pip install torch"),
    ],
)
def test_errors_end_in_one_line(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(args: object) -> int:
        raise error

    monkeypatch.setattr("superoffload.tools.verify.run", fails)
    assert main(["verify"]) == status
    shown = capsys.readouterr().err
    assert re.search(said, shown.rstrip("\n")) and shown.count("\n") == 1


def test_version_and_help_do_not_load_torch() -> None:
    script = (
        "import sys; from superoffload.tools.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: status = stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
        "sys.exit(status)"
    )
    for argument, expected in (("--version", f"superoffload {__version__}"), ("--help", "verify")):
        done = subprocess.run([sys.executable, "-c", script, argument], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "superoffload"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"superoffload {__version__}\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage: superoffload" in done.stderr
    assert all(re.search(rf"^ +{name} +\w+ \w+", done.stderr, re.MULTILINE) for name in COMMANDS), "one line each"


def test_a_command_that_does_not_exist_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docter"]) == main(["--docter"]) == 2
    assert "'docter': did you mean doctor? expected a command: verify, " in capsys.readouterr().err


def test_full_disk_is_a_clear_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux: writes to /dev/full")
    with pytest.raises(SuperOffloadError, match=r"/dev/full: cannot be written \(No space"):
        write_json("/dev/full", {"a": 1})
