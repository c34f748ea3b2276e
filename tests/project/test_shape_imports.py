"""The shape of the package: imports go one way, the root has what users import, a name stands for one thing."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

import superoffload
from tests.support.checkout import ROOT
from tests.support.scripts import load_script

PACKAGE = Path(superoffload.__file__).resolve().parent

# Each row may import from the rows below it, and a folder from itself.
ROWS = (
    {"__main__"},
    {"tools"},
    {"__init__"},  # names for what is below
    {"integrations", "checkpoints"},
    {"adamw", "cpu_adamw"},
    {"exporter"},
    {"metrics", "timeline"},
    {"optimizer"},
    {"engine"},
    {"links", "distributed"},
    {"engine/bucket"},  # shards, buckets and journal widths: vocabulary that all may read
    {"kernels"},
    {"host"},
    {"errors", "_native", "_version"},
)
USERS_IMPORT = {"adamw", "cpu_adamw", "kernels", "errors", "metrics", "exporter", "timeline"}
BUILT = {"_native", "_version", "__init__", "__main__"}

import_graph = load_script("import_graph")
GRAPH = import_graph.imports_of(PACKAGE)


def row_of(module: str) -> int:
    room = import_graph.room_of(module).removeprefix("superoffload").lstrip(".") or "__init__"
    (row,) = (number for number, rooms in enumerate(ROWS) if room in rooms)
    return row


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_go_one_way(module: str) -> None:
    upwards = [
        other
        for other in GRAPH[module]
        if row_of(other) <= row_of(module) and import_graph.room_of(other) != import_graph.room_of(module)
    ]
    assert not upwards


def test_there_are_no_circles_of_imports() -> None:
    assert import_graph.circles(GRAPH) == []
    assert import_graph.circles(import_graph.rooms_of(GRAPH)) == []


def test_the_root_has_what_users_import_and_nothing_else() -> None:
    files = {path.name.partition(".")[0] for path in PACKAGE.iterdir() if path.is_file()}
    assert files == USERS_IMPORT | BUILT | {"py"}  # py.typed


def test_no_file_name_occurs_twice() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            places[path.stem].append(str(path.relative_to(PACKAGE)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}


def test_the_picture_in_the_documents_shows_the_imports_as_they_are(tmp_path: Path) -> None:
    """The places of boxes and arrows tell; the versions of the library that draws may differ in the rest."""
    drawn = tmp_path / "imports.svg"
    import_graph.draw(GRAPH, drawn, import_graph.notes_of(PACKAGE))
    in_documents = ROOT / "docs" / "images" / "imports.svg"
    assert paths_of(in_documents) == paths_of(drawn), "python scripts/import_graph.py --draw docs/images/imports.svg"


def paths_of(picture: Path) -> list[tuple[str, str]]:
    """Texts and outlines of a picture."""
    text = picture.read_text(encoding="utf-8")
    found: list[tuple[str, str]] = re.findall(r'<text[^>]*>([^<]*)</text>|<path d="([^"]*)"', text)
    return found
