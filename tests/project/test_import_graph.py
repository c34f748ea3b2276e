"""scripts/import_graph.py: imports of a package, circles and layers of them, and the picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.scripts import load_script

import_graph = load_script("import_graph")


def written(folder: Path, sources: Mapping[str, str]) -> Path:
    """A package of these files."""
    for name, text in sources.items():
        path = folder / "made_up" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "made_up"


EVERY_KIND = {
    "__init__.py": "import os\nfrom made_up.top import run",
    "top.py": (
        "from typing import TYPE_CHECKING\n"
        "import made_up.rooms.low as low, torch\n"
        "if TYPE_CHECKING:\n    from made_up.rooms.typed import Kind\n"
        "def run():\n    from made_up import late\n"
    ),
    "late.py": "from made_up import absent_name\nfrom made_up_too import other",
    "rooms/__init__.py": "from .low import *",
    "rooms/low.py": "from .. import late, _compiled\nfrom . import typed\nfrom .typed import Kind",
    "rooms/typed.py": "from made_up.rooms.typed import itself",
    "_compiled.pyi": "def call() -> None: ...",
}


def test_every_kind_of_import_statement_counts(tmp_path: Path) -> None:
    assert import_graph.imports_of(written(tmp_path, EVERY_KIND)) == {
        "made_up": {"made_up.top"},
        "made_up.top": {"made_up.rooms.low", "made_up.rooms.typed", "made_up.late"},
        "made_up.late": {"made_up"},
        "made_up.rooms": {"made_up.rooms.low"},
        "made_up.rooms.low": {"made_up.late", "made_up._compiled", "made_up.rooms.typed"},
        "made_up.rooms.typed": set(),
        "made_up._compiled": set(),
    }


def test_circles_are_groups_that_import_each_other_over_others_too() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert import_graph.circles(graph) == [["a", "b", "c"], ["d", "e"]]
    assert import_graph.circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_a_circle_of_folders_need_not_be_one_of_modules() -> None:
    graph = {"p.a.x": {"p.b.x"}, "p.b.x": set(), "p.b.y": {"p.a.y"}, "p.a.y": {"p.a.x"}, "p.errors": set()}
    assert import_graph.circles(graph) == []
    assert import_graph.rooms_of(graph) == {"p.a": {"p.b"}, "p.b": {"p.a"}, "p.errors": set()}
    assert import_graph.circles(import_graph.rooms_of(graph)) == [["p.a", "p.b"]]


def test_layers_have_what_imports_above_what_it_imports() -> None:
    graph = {
        "tools": {"adamw"}, "adamw": {"engine", "host"}, "engine": {"links", "errors"}, "links": {"engine", "host"},
        "host": set(), "errors": set(), "alone": set(),
    }  # fmt: skip
    assert import_graph.layers(graph) == [
        [["tools"]],
        [["adamw"]],
        [["engine", "links"]],
        [["alone"], ["errors"], ["host"]],
    ]
    assert import_graph.layers({}) == []


def picture(graph: Mapping[str, set[str]], path: Path) -> str:
    import_graph.draw(graph, path)
    return path.read_text(encoding="utf-8")


def test_the_picture_names_folders_and_leaves_out_arrows_that_follow_from_others(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'superoffload[demo]'")
    graph = {"p.tools.a": {"p.engine.a", "p.host.a"}, "p.engine.a": {"p.host.a"}, "p.host.a": set(), "p.errors": set()}
    drawn = picture(graph, tmp_path / "graph.svg")
    for label in ("tools/", "engine/", "host/", "errors"):
        assert f">{label}<" in drawn
    assert import_graph.CIRCLE_COLOUR not in drawn, "there is no circle"
    apart = picture({**graph, "p.engine.a": set()}, tmp_path / "apart.svg")
    arrows = [text.count(f"stroke: {import_graph.ARROW_COLOUR}") for text in (drawn, apart)]
    assert arrows[0] == arrows[1] > 0, "tools to engine and engine to host; then tools to both"
    assert picture(graph, tmp_path / "again.svg") == drawn, "the same imports give the same file"
    circle = picture({**graph, "p.host.a": {"p.engine.a"}}, tmp_path / "circle.svg")
    assert import_graph.CIRCLE_COLOUR in circle


def test_a_picture_may_be_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'superoffload[demo]'")
    many = {f"p.folder_with_a_long_name_{i}.m": {f"p.folder_with_a_long_name_{(i + 1) % 12}.m"} for i in range(12)}
    import_graph.draw({**many, "p.beside": set()}, tmp_path / "graph.png")
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_whether_there_are_circles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, {"a.py": "from made_up import b", "b.py": ""})
    assert import_graph.main([str(folder)]) == 0
    assert "2 modules, 1 imports among them\ncircles of modules: 0" in capsys.readouterr().out
    (folder / "b.py").write_text("def late():\n    import made_up.a\n", encoding="utf-8")
    assert import_graph.main([str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "a circle of 2:\n    made_up.a imports made_up.b\n    made_up.b imports made_up.a" in printed
    with pytest.raises(SystemExit):
        import_graph.main([str(tmp_path / "absent")])


def test_the_package_itself_can_be_read() -> None:
    graph = import_graph.imports_of(import_graph.PACKAGE)
    assert "superoffload._native" in graph["superoffload.kernels"] and not graph["superoffload._native"]
    assert all(imported <= set(graph) for imported in graph.values())
