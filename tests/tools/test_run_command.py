"""`superoffload run` in a checkout: children find superoffload there, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import superoffload
from superoffload.tools.cli import main
from superoffload.tools.run import environment

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
    assert main(["run", "--", str(script)]) == 2
    said = capsys.readouterr().err
    assert f"run: {script}: cannot be started" in said and "#! line" in said and said.count("\n") == 1
