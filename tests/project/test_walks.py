"""scripts/walks.py: which calls and moves between files it counts, and its table."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import load_script

walks = load_script("walks")

ONE = """
import contextlib
from walked import two

def start():
    return [two.call(number) for number in range(2)]

def over_others():
    with contextlib.suppress(ValueError), two.held():
        return sorted([2, 1], key=two.key)

def fails():
    with contextlib.suppress(ValueError):
        two.fail()
    return inside()

def inside():
    return 1
"""
TWO = """
import contextlib

def call(number):
    return key(number)

def key(number):
    return number

def fail():
    raise ValueError

@contextlib.contextmanager
def held():
    yield
"""


@pytest.fixture
def walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = tmp_path / "walked"
    folder.mkdir()
    for name, text in (("__init__", ""), ("one", ONE), ("two", TWO)):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("walked", "walked.one", "walked.two"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return import_module("walked.one")


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    walked: dict[str, list[Any]] = walks.gradient_walks()
    return walked


@pytest.mark.parametrize(
    ("name", "calls", "moves"),
    [
        ("start", 5, 2),  # itself, call() twice from a comprehension, key() from its own file
        ("over_others", 5, 4),  # itself, held() begins and goes on, key() twice out of sorted()
        ("fails", 3, 1),  # itself, fail(), inside()
        ("inside", 1, 0),  # called from outside
    ],
)
def test_calls_and_moves_between_files(walked: ModuleType, name: str, calls: int, moves: int, tmp_path: Path) -> None:
    walker = walks.Walker(str(tmp_path / "walked") + os.sep)
    with walker.following() as walk:
        getattr(walked, name)()
        json.dumps([1])  # of another package
    assert (walk.calls, walk.moves) == (calls, moves), walk.tree
    assert walk.files == (1 if name == "inside" else 2)
    assert sys.getprofile() is None
    walked.start()
    assert walk.calls == calls, "nothing is counted behind the block"


def test_a_walk_ends_where_another_begins(walked: ModuleType, tmp_path: Path) -> None:
    walker = walks.Walker(str(tmp_path / "walked") + os.sep)
    with walker.following() as before:
        walked.inside()
        after = walker.begin()
        walked.start()
    assert (before.calls, after.calls) == (1, 5)


def test_gradients_and_steps_are_walked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert walks.main(["--json", str(tmp_path / "walks.json"), "--trees"]) == 0
    report = json.loads((tmp_path / "walks.json").read_text(encoding="utf-8"))
    assert report["versions"]["superoffload"] and report["versions"]["python"]
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == [
        walks.FIRST, walks.OTHER, walks.COMPLETES, walks.LAST,
        walks.STEP, walks.STEP_MORE, walks.ZERO_GRAD, walks.ZERO_GRAD_MORE,
    ]  # fmt: skip
    assert rows[walks.COMPLETES]["calls"] > rows[walks.OTHER]["calls"] >= 1
    for name in (walks.FIRST, walks.OTHER, walks.COMPLETES, walks.LAST, walks.STEP, walks.ZERO_GRAD):
        row = rows[name]
        assert 0 <= row["moves"] < row["calls"] and 1 <= row["files"] <= row["calls"]
        assert row["moves"] <= row["most_moves"]
    printed = capsys.readouterr().out
    for name in rows:
        assert f"\n{name} " in printed
    assert re.search(rf"\n{re.escape(walks.STEP)}:\n\S+  \(\S+\.py\)\n  \S+  \(", printed), "a tree of calls"


@pytest.mark.parametrize(("kind", "limit"), [(walks.OTHER, 3), (walks.COMPLETES, 16), (walks.LAST, 15)])
def test_a_gradient_moves_between_few_files(kind: str, limit: int, found: dict[str, list[Any]]) -> None:
    """Of each kind every walk: also that of a step's first bucket, which reads hyper-parameters."""
    for walk in found[kind]:
        assert walk.moves <= limit, walks.tree(walk)


def test_steps_that_were_not_speculated_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "_NEVER_CLIPS", 1e-3)
    with pytest.raises(RuntimeError, match="nothing was counted"):
        walks.step_walks(1)
