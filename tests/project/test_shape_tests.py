"""The shape of the tests: what tests share lies in tests/support, names are unique, and no file is long."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.checkout import ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
# Programs by hand have their modules beside them, and so do the tests that a GPU machine runs alone.
WITH_HELPERS = ("support", "simulator", "fuzz", "gpu")
# pytest and Python ask for these names.
IN_EVERY_FOLDER = ("__init__.py", "__main__.py", "conftest.py")
# Commands that have another home now; these files forward to it.
FORWARDERS = ("kernel_battery.py", "compatibility.py")
IN_A_STRING = re.compile(r"\btests(?:\.\w+)*\.test_\w+")


def is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def named_tests(path: Path) -> Iterator[str]:
    """The test modules that a file imports, or names in the text of a program."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = IN_A_STRING.findall(node.value)
        else:
            continue
        yield from (name for name in names if IN_A_STRING.match(name))


def test_nothing_imports_a_test() -> None:
    checked = [path for folder in ("tests", "benchmarks", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {str(path.relative_to(ROOT)): found for path in checked if (found := list(named_tests(path)))} == {}


def may_have_helpers(path: Path) -> bool:
    return (
        path.name in IN_EVERY_FOLDER
        or path.relative_to(TESTS).parts[0] in WITH_HELPERS
        or (path.parent == TESTS and path.name in FORWARDERS)
    )


def test_what_tests_share_lies_in_support() -> None:
    helpers = [path for path in FILES if not is_test(path)]
    assert [str(path.relative_to(TESTS)) for path in helpers if not may_have_helpers(path)] == []


def test_support_has_no_tests() -> None:
    support = sorted((TESTS / "support").rglob("*.py"))
    assert [path.name for path in support if is_test(path)] == []
    nodes = [node for path in support for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    assert [name for name in functions if name.startswith("test_")] == []


def test_no_test_lies_beside_the_folders() -> None:
    beside = {path.name for path in FILES if path.parent == TESTS and path.name not in IN_EVERY_FOLDER}
    assert beside == set(FORWARDERS)


def test_no_name_of_a_file_occurs_twice_among_tests_or_helpers() -> None:
    for tests in (True, False):
        files = [path for path in FILES if path.parent != TESTS and path.name not in IN_EVERY_FOLDER]
        names = [path.name for path in files if is_test(path) is tests]
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_folder_is_a_package_with_a_sentence() -> None:
    """Without it two files could not be imported beside each other as tests.FOLDER.NAME."""
    for folder in {path.parent for path in FILES}:
        package = folder / "__init__.py"
        assert package.is_file(), folder
        assert ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))), package


def test_a_file_has_at_most_400_lines() -> None:
    lines = {str(path.relative_to(TESTS)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > 400} == {}
