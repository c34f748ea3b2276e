"""Draws which folders of the package import which, and prints circles of imports.

    python scripts/import_graph.py [FOLDER] [--draw graph.svg]

Every import statement counts, those for type checkers and inside functions too. Exits with 1 if there are circles.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "superoffload"

# What folders beside the engine may import from it.
VOCABULARY = (
    "engine.bucket",
    "engine.master_halves",
    "engine.journal",
)

Graph = Mapping[str, AbstractSet[str]]

# ---- reading ----------------------------------------------------------------------------------------------------


def imports_of(package_folder: Path) -> dict[str, set[str]]:
    """Returns the modules of the package, each with the modules of the package that it imports.

    A module is named in full, a package by its folder. ``from package import name`` counts for the module ``name``
    where there is one, else for the package. A module imports the packages around it too, whenever it is loaded; that
    does not count, nor do modules that are named by a string.
    """
    files = _files(package_folder)
    return {name: set(_imported(path, name, files)) - {name} for name, path in files.items()}


def _files(package_folder: Path) -> dict[str, Path]:
    """Returns source files by module; a compiled module's source is its stub."""
    found: dict[str, Path] = {}
    for suffix in (".pyi", ".py"):
        for path in sorted(package_folder.rglob(f"*{suffix}")):
            parts = path.relative_to(package_folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(path: Path, name: str, files: Mapping[str, Path]) -> Iterator[str]:
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            asked = (f"{base}.{alias.name}" for alias in node.names)
            yield from (each if each in files else base for each in asked if each in files or base in files)


def _base(node: ast.ImportFrom, package: str) -> str:
    """Returns the full module name between ``from`` and ``import``."""
    if not node.level:
        return node.module or ""
    around = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*around, *([node.module] if node.module else [])])


# ---- circles and layers -----------------------------------------------------------------------------------------


def circles(graph: Graph) -> list[list[str]]:
    """Returns the groups of modules that import one another, directly or over others."""
    reached = _reached(graph)
    groups = {tuple(_mutual(name, reached)) for name in graph if name in reached[name]}
    return [list(group) for group in sorted(groups)]


def layers(graph: Graph) -> list[list[list[str]]]:
    """Returns rows of groups, importers first: a group imports only from lower rows. It is one name, or a circle."""
    reached = _reached(graph)
    group_of = {name: _mutual(name, reached) for name in graph}
    height: dict[str, int] = {}
    for name in sorted(graph, key=lambda name: len(reached[name] | {name})):  # what it imports reaches fewer
        below = {other for member in group_of[name] for other in graph[member]} - set(group_of[name])
        height[name] = 1 + max((height[other] for other in below), default=-1)
    rows: list[list[list[str]]] = [[] for _ in range(1 + max(height.values(), default=-1))]
    for name in sorted(graph):
        if name == group_of[name][0]:
            rows[-1 - height[name]].append(group_of[name])
    return rows


def rooms_of(graph: Graph) -> dict[str, set[str]]:
    """Returns the same graph for the folders directly inside the package and the modules beside them."""
    rooms: dict[str, set[str]] = {}
    for name, imported in graph.items():
        room = rooms.setdefault(room_of(name), set())
        room.update({room_of(other) for other in imported} - {room_of(name)})
    return rooms


def room_of(module: str) -> str:
    """Returns the folder directly inside the package, or the module beside it; the vocabulary is a room of its own."""
    package, *inside = module.split(".")
    if ".".join(inside) in VOCABULARY:
        return f"{package}.{VOCABULARY[0].replace('.', '/')}"
    return ".".join([package, *inside[:1]])


def _reached(graph: Graph) -> dict[str, set[str]]:
    """Returns all that each name imports, directly or over others; itself only in a circle."""
    found: dict[str, set[str]] = {}
    for name in graph:
        seen: set[str] = set()
        ahead = list(graph[name])
        while ahead:
            each = ahead.pop()
            if each not in seen:
                seen.add(each)
                ahead += graph[each]
        found[name] = seen
    return found


def _mutual(name: str, reached: Mapping[str, AbstractSet[str]]) -> list[str]:
    return sorted({name} | {other for other in reached[name] if name in reached[other]})


# ---- drawing ----------------------------------------------------------------------------------------------------

_ROOM_HEIGHT, _LINE_HEIGHT, _GAP = 0.42, 0.17, 0.42  # inches
_ROW_WIDTH, _LETTER, _PADDING = 12.0, 0.082, 0.26
_NAMES_PER_LINE = 4
_NOTE_WIDTH = 44  # letters
_INK, _PALE, _PLAIN, CIRCLE_COLOUR, ARROW_COLOUR = "#1d2733", "#e4edf7", "#f4f1e8", "#c0392b", "#8a97a6"


@dataclass
class _Box:
    """Draws a folder, or the modules of one row that lie beside the folders."""

    lines: Sequence[str]  # names, then the note on them
    colour: str
    names: int = 1  # how many of the lines are names
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        return max(len(line) for line in self.lines) * _LETTER + _PADDING

    @property
    def height(self) -> float:
        return _ROOM_HEIGHT + _LINE_HEIGHT * (len(self.lines) - 1)


@dataclass
class _Cell:
    """Groups what is drawn together: one box, or a circle's boxes in a frame. ``names``: its nodes of the graph."""

    names: frozenset[str]
    boxes: list[_Box] = field(default_factory=list)
    in_circle: bool = False

    @property
    def left(self) -> float:
        return min(box.x for box in self.boxes)

    @property
    def right(self) -> float:
        return max(box.x + box.width for box in self.boxes)

    @property
    def top(self) -> float:
        return max(box.y + box.height for box in self.boxes)

    @property
    def bottom(self) -> float:
        return min(box.y for box in self.boxes)


def notes_of(package_folder: Path) -> dict[str, str]:
    """Returns the first sentence of the docstring of each folder inside the package, and of the vocabulary."""
    notes = {}
    for name, path in _files(package_folder).items():
        is_room = path.stem == "__init__" and name.count(".") == 1
        if is_room or name.partition(".")[2] == VOCABULARY[0]:
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            notes[room_of(name)] = " ".join(re.split(r"(?<=[.!?])\s", said, maxsplit=1)[0].replace("`", "").split())
    return notes


def draw(graph: Graph, path: Path, notes: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes the picture of ``rooms_of(graph)``, SVG or PNG by the name of ``path``, importers above what they import.

    It omits arrows that follow from others and frames circles in red. ``notes``: text below the names of folders.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rooms = rooms_of(graph)
    folders = {room_of(name) for name in graph if name.count(".") >= 2}
    rows = [_cells(row, folders, notes) for row in layers(rooms)]
    width, height = _place(rows)
    with matplotlib.rc_context({"svg.hashsalt": "imports", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(width, height), dpi=144)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, width)
        axes.set_ylim(0, height)
        axes.axis("off")
        cells = [cell for row in rows for cell in row]
        for upper, lower in _arrows(cells, rooms):
            _draw_arrow(axes, upper, lower)
        for cell in cells:
            _draw_cell(axes, cell)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _cells(row: Sequence[Sequence[str]], folders: AbstractSet[str], notes: Mapping[str, str]) -> list[_Cell]:
    """Returns the cells of one row. Modules beside the folders share one box, since there are many."""
    cells, beside = [], []
    for group in row:
        if len(group) == 1 and group[0] not in folders:
            beside.append(group[0])
        else:
            shown = [(name, textwrap.wrap(notes.get(name, ""), _NOTE_WIDTH)) for name in group if name in folders]
            boxes = [
                _Box([f"{_short(name)}/" if "/" not in name else _short(name), *note], _PALE) for name, note in shown
            ]
            alone = [name for name in group if name not in folders]
            boxes += [_in_box(alone)] if alone else []
            cells.append(_Cell(frozenset(group), boxes, in_circle=len(group) > 1))
    if beside:
        cells.append(_Cell(frozenset(beside), [_in_box(beside)]))
    return cells


def _in_box(names: Sequence[str]) -> _Box:
    shown = [_short(name) for name in names]
    lines = ["  ".join(shown[i : i + _NAMES_PER_LINE]) for i in range(0, len(shown), _NAMES_PER_LINE)]
    return _Box(lines, _PLAIN, names=len(lines))


def _short(room: str) -> str:
    """Returns the name without the package's; a package's own ``__init__.py`` has no other name."""
    return room.partition(".")[2] or "__init__"


def _place(rows: Sequence[Sequence[_Cell]]) -> tuple[float, float]:
    """Places each box, row by row; returns the width and the height of the picture."""
    placed, y = [], 0.0
    for row in reversed(rows):
        lines = _broken([(cell, box) for cell in row for box in cell.boxes])
        for line in reversed(lines):
            x = 0.0
            for cell, box in line:
                x += _GAP / 2 if cell.in_circle else _GAP
                box.x, box.y = x, y + _GAP / 2
                x += box.width
            y += max(box.height for _, box in line) + 0.6 * _GAP
            placed.append(([box for _, box in line], x))
        y += _GAP / 2
    width = max(x for _, x in placed) + _GAP
    for boxes, x in placed:
        for box in boxes:
            box.x += (width - x - _GAP) / 2  # centred
    return width, y + _GAP


def _broken(boxes: Sequence[tuple[_Cell, _Box]]) -> list[list[tuple[_Cell, _Box]]]:
    """Breaks a row into lines that are not too wide; when it breaks, a circle gets its own lines, for its frame."""
    if sum(box.width + _GAP for _, box in boxes) <= _ROW_WIDTH:
        return [list(boxes)]
    lines: list[list[tuple[_Cell, _Box]]] = [[]]
    for cell, box in boxes:
        last = lines[-1]
        wide = sum(each.width + _GAP for _, each in last) + box.width > _ROW_WIDTH
        another = bool(last) and last[-1][0] is not cell and (cell.in_circle or last[-1][0].in_circle)
        if last and (wide or another):
            lines.append([])
        lines[-1].append((cell, box))
    return lines


def _arrows(cells: Sequence[_Cell], rooms: Graph) -> list[tuple[_Cell, _Cell]]:
    """Returns arrows from each cell to those it imports, except those it reaches over others."""
    cell_of = {name: i for i, cell in enumerate(cells) for name in cell.names}
    direct: dict[str, set[str]] = {}
    for i, cell in enumerate(cells):
        imported = {cell_of[other] for name in cell.names for other in rooms[name]} - {i}
        direct[str(i)] = {str(other) for other in imported}
    reached = _reached(direct)
    kept = []
    for name, imported_names in direct.items():
        over_others = set().union(*(reached[other] for other in imported_names))
        kept += [(cells[int(name)], cells[int(other)]) for other in sorted(imported_names - over_others, key=int)]
    return kept


def _draw_arrow(axes: Any, upper: _Cell, lower: _Cell) -> None:
    margin = _GAP / 4
    start = ((upper.left + upper.right) / 2, upper.bottom - (margin if upper.in_circle else 0))
    end = ((lower.left + lower.right) / 2, lower.top + (margin if lower.in_circle else 0))
    style = {"arrowstyle": "-|>", "color": ARROW_COLOUR, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 1}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def _draw_cell(axes: Any, cell: _Cell) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    if cell.in_circle:
        margin = _GAP / 4
        size = (cell.right - cell.left + 2 * margin, cell.top - cell.bottom + 2 * margin)
        corner = (cell.left - margin, cell.bottom - margin)
        axes.add_patch(
            Rectangle(corner, *size, facecolor="white", edgecolor=CIRCLE_COLOUR, linestyle="--", linewidth=1.2)
        )
    for box in cell.boxes:
        shape = "round,pad=0,rounding_size=0.08"
        axes.add_patch(
            FancyBboxPatch(
                (box.x, box.y),
                box.width,
                box.height,
                boxstyle=shape,
                facecolor=box.colour,
                edgecolor=_INK,
                linewidth=0.8,
                zorder=3,
            )
        )
        for i, line in enumerate(box.lines):
            y = box.y + box.height / 2 + _LINE_HEIGHT * ((len(box.lines) - 1) / 2 - i)
            is_name = i < box.names
            style = {"fontsize": 9 if is_name else 7.5, "weight": "bold" if is_name else "normal", "color": _INK}
            axes.text(box.x + box.width / 2, y, line, ha="center", va="center", zorder=4, **style)


# ---- the command ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Circles of imports in a package, and a picture of its folders.")
    parser.add_argument("folder", type=Path, nargs="?", default=PACKAGE, help="of the package (default: superoffload)")
    parser.add_argument("--draw", type=Path, metavar="PATH", help="write the picture, SVG or PNG by its name")
    args = parser.parse_args(arguments)
    graph = imports_of(args.folder)
    if not graph:
        parser.error(f"{args.folder}: no Python files there")
    among_modules, among_rooms = circles(graph), circles(rooms_of(graph))
    print(f"{len(graph)} modules, {sum(map(len, graph.values()))} imports among them")
    _show("modules", among_modules, graph)
    _show("folders and modules beside them", among_rooms, rooms_of(graph))
    if args.draw is not None:
        draw(graph, args.draw, notes_of(args.folder))
    return 1 if among_modules or among_rooms else 0


def _show(what: str, found: Sequence[Sequence[str]], graph: Graph) -> None:
    print(f"circles of {what}: {len(found)}")
    for circle in found:
        print(f"  a circle of {len(circle)}:")
        for name in circle:
            print(f"    {name} imports {', '.join(sorted(graph[name] & set(circle)))}")


if __name__ == "__main__":
    sys.exit(main())
