"""The shape of the package: no private name crosses folders, no file is long, and each folder has a budget."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import superoffload

PACKAGE = Path(superoffload.__file__).resolve().parent
FILES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
# Lines and files of each folder, which may only fall.
BUDGET = {
    "root": (1738, 10),
    "optimizer": (5480, 23),
    "engine": (3730, 17),
    "links": (1887, 12),
    "distributed": (1886, 6),
    "checkpoints": (1698, 6),
    "integrations": (4684, 24),
    "host": (925, 9),
    "tools": (1439, 9),
}


def folder_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE).parts
    return inside[0] if len(inside) > 1 else "root"


def is_private(name: str) -> bool:
    """Of ours; torch's counter of writes and Python's named tuples have such names in public use."""
    return name.startswith("_") and not name.endswith("__") and name not in ("_version", "_replace")


def private_names(tree: ast.AST) -> Iterator[str]:
    """What a file defines or assigns to itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):  # a dataclass's field
            yield node.target.id


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_private_name_is_read_across_folders() -> None:
    folders: dict[str, set[str]] = defaultdict(set)
    for path, tree in FILES.items():
        for name in private_names(tree):
            folders[name].add(folder_of(path))
    found = []
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("superoffload."):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
                names = [node.attr]
            else:
                continue
            for name in filter(is_private, names):
                if name in folders and folder_of(path) not in folders[name]:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}")
    assert found == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_has_at_most_600_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600


def test_each_folder_keeps_to_its_budget() -> None:
    lines: dict[str, int] = defaultdict(int)
    files: dict[str, int] = defaultdict(int)
    for path in FILES:
        lines[folder_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
        files[folder_of(path)] += 1
    used = {folder: (lines[folder], files[folder]) for folder in lines}
    assert [
        folder for folder in used if used[folder][0] > BUDGET[folder][0] or used[folder][1] > BUDGET[folder][1]
    ] == []
    loose = {folder for folder in used if used[folder][0] < 0.9 * BUDGET[folder][0]}
    assert loose == set(), f"the budget falls with what it counts: {used}"


@pytest.mark.parametrize("one", [superoffload.AdamW, superoffload.CPUAdamW])
def test_optimizers_inherit_from_torchs_alone(one: type) -> None:
    assert one.__bases__ == (torch.optim.Optimizer,)
