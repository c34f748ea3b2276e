"""The shape of the optimizers: at most one class of ours above another, private names and attributes of their owner."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import superoffload

PACKAGE = Path(superoffload.__file__).resolve().parent
FOLDERS = ("optimizer", "engine")
FILES = [
    *(PACKAGE / name for name in ("adamw.py", "cpu_adamw.py", "bucket.py")),
    *(path for name in FOLDERS for path in sorted((PACKAGE / name).glob("*.py"))),
]

# Private names of others that are read, each with the reason why there is no other way.
READ = {
    "_cdata": "torch: the only identity of a storage that does not keep it alive",
    "_foreach_add_": "torch: what its own optimizers count steps with",
    "_version": "torch: the counter of writes to a tensor, which has no other name",
    "_replace": "Python: the method of named tuples that makes another one, public in spite of its name",
}
# Attributes of others that are assigned.
ASSIGNED = {
    "__cause__": "Python: an error says which one came before it",
    "grad": "torch: p.grad is the user's, and a placeholder has to stand there",
}


def of_others(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes of anything but the object, or the class, whose method uses them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not isinstance(of, ast.Name) or of.id not in ("self", "cls", "super"):
                yield node


def private_reads(tree: ast.AST) -> Iterator[ast.Attribute]:
    return (node for node in of_others(tree) if node.attr.startswith("_") and not node.attr.endswith("__"))


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """``del`` counts."""
    return (node for node in of_others(tree) if isinstance(node.ctx, (ast.Store, ast.Del)))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_protocol(one: type) -> bool:
    return bool(getattr(one, "_is_protocol", False))


def ours_above(one: type) -> list[type]:
    """The classes of this project that it inherits from, protocols aside."""
    return [
        above for above in one.__mro__[1:] if above.__module__.startswith("superoffload.") and not is_protocol(above)
    ]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_class_has_at_most_one_class_of_ours_above_it(path: Path) -> None:
    module = importlib.import_module(name_of(path))
    for _, one in inspect.getmembers(module, inspect.isclass):
        if one.__module__ == module.__name__:
            assert len(ours_above(one)) <= 1, one


@pytest.mark.parametrize("one", [superoffload.AdamW, superoffload.CPUAdamW])
def test_optimizers_inherit_from_torchs_alone(one: type) -> None:
    assert one.__bases__ == (torch.optim.Optimizer,)
    assert ours_above(one) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_are_read_by_their_owner_only(path: Path) -> None:
    found = [
        f"{ast.unparse(node)}, line {node.lineno}" for node in private_reads(parsed(path)) if node.attr not in READ
    ]
    assert not found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_attributes_are_assigned_by_their_owner_only(path: Path) -> None:
    found = [f"{ast.unparse(node)}, line {node.lineno}" for node in assigned(parsed(path)) if node.attr not in ASSIGNED]
    assert not found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_has_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_every_exception_is_needed() -> None:
    read = {node.attr for path in FILES for node in private_reads(parsed(path))}
    written = {node.attr for path in FILES for node in assigned(parsed(path))}
    assert (set(READ) - read, set(ASSIGNED) - written) == (set(), set())


def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))
