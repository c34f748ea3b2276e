"""docs/compatibility.md says what the marks of the tests say, and no cell is empty."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.checkout import ROOT
from tests.support.compatibility import COLUMNS, PAGE, SECTIONS, Cell, Collector, Refusal, page, problems


def test_the_page_is_what_the_tests_say(request: pytest.FixtureRequest) -> None:
    if is_whole(request.session):
        collector = Collector()
        collector.pytest_collection_modifyitems(request.session.items)
        assert problems(collector.table) == []
        assert page(collector.table, SECTIONS) == PAGE.read_text(), (
            "write it with python -m tests.support.compatibility"
        )
        return
    # Only some of the tests are in this run; collecting the others in this process would disturb it.
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.compatibility", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def is_whole(session: pytest.Session) -> bool:
    """Whether the run has every test with a compat mark: all of their files, whole."""
    option = session.config.option
    chosen = any("::" in argument for argument in session.config.args) or option.keyword or option.markexpr
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"\bcompat\(", path.read_text())}
    return not chosen and not session.config.getoption("deselect") and marked <= {item.path for item in session.items}


def test_cells_as_text() -> None:
    cell = Cell(works=["tests/a.py::test_x", "tests/a.py::test_y"], notes=["slowly"])
    assert cell.text() == "works, slowly (a.py: `test_x`, `test_y`)"
    refused = Cell(works=["tests/a.py::test_x"], refused="use b | c")
    table = {"row": dict.fromkeys(COLUMNS, refused)}
    assert "refused: “use b \\| c”" in page(table, {"Section": ["row"]})


def test_a_refusal_must_be_the_one_that_is_quoted() -> None:
    with pytest.raises(AssertionError, match="the page quotes"), Refusal(["use b"])():
        raise ValueError("use c")
    with pytest.raises(AssertionError, match="needs a compat mark"), Refusal([])():
        raise ValueError("use c")
