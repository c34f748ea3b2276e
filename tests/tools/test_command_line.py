"""The `superoffload` command: what all subcommands share, and `superoffload run` in a checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import superoffload
from superoffload import __version__
from superoffload.errors import SuperOffloadError
from superoffload.tools.cli import COMMANDS, main
from superoffload.tools.output import write_json
from superoffload.tools.run import environment


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "^superoffload: error: interrupted$"),
        (RuntimeError("CUDA out of memory. Tried\nmore lines"), 1, "memory: CUDA out of memory. Tried"),
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


def test_version_and_help_do_not_load_torch_and_the_package_runs_as_a_module() -> None:
    script = "import sys; sys.modules['torch'] = None; from superoffload.tools.cli import main; main(sys.argv[1:])"
    for how, arguments, expected in (
        (["-c", script], ["--version"], f"superoffload {__version__}"),
        (["-c", script], ["--help"], "verify"),
        (["-m", "superoffload"], ["--version"], f"superoffload {__version__}"),
    ):
        done = subprocess.run([sys.executable, *how, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and expected in done.stdout, done.stderr
    done = subprocess.run([sys.executable, "-m", "superoffload"], capture_output=True, text=True, timeout=60)
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


# ---- superoffload run: children find superoffload there, and nothing else --------------------------------------------

ROOT = Path(superoffload.__file__).resolve().parents[1]
CHILD = """
import os, sys
import superoffload
print(os.path.dirname(os.path.dirname(os.path.abspath(superoffload.__file__))))
print([entry for entry in sys.path if os.path.abspath(entry) == sys.argv[1]])
import json.tool, tests_of_a_user
print(tests_of_a_user.value)
"""


def test_nothing_beside_superoffload_comes_before_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "tests_of_a_user.py").write_text("value = 7")
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert str(ROOT) not in environment(inherited)["PYTHONPATH"].split(os.pathsep)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from superoffload.tools.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--", sys.executable, "-c", CHILD, str(ROOT)],
        cwd=tmp_path, env=inherited, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(ROOT), "[]", "7"]


@pytest.mark.parametrize("content", ["print(1)\n", "#!/no/such/interpreter\n", "\x7fELF\0"])
def test_a_program_that_cannot_be_started(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script"
    script.write_text(content)
    script.chmod(0o755)
    with mock.patch("superoffload.tools.run.find_spec", return_value=None):
        assert main(["run", "--", str(script)]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert "this Python has no deepspeed" in warning
    assert f"run: {script}: cannot be started" in error and "#! line" in error
