"""The shape of optimizers and of the ZeRO-3 adapter: at most one class of ours above another, private names and
attributes of their owner."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import superoffload

PACKAGE = Path(superoffload.__file__).resolve().parent
ADAPTER = PACKAGE / "integrations" / "deepspeed"
STAGE3 = ADAPTER / "stage3" / "optimizer.py"
FILES = [
    *(PACKAGE / name for name in ("adamw.py", "cpu_adamw.py", "bucket.py")),
    *(path for name in ("optimizer", "engine") for path in sorted((PACKAGE / name).glob("*.py"))),
    *sorted(ADAPTER.rglob("*.py")),
]

# Private names of others that are read, each with the reason why there is no other way.
READ = {
    "_cdata": "torch: the only identity of a storage that does not keep it alive",
    "_foreach_add_": "torch: what its own optimizers count steps with",
    "_version": "torch: the counter of writes to a tensor, which has no other name",
    "_replace": "Python: the method of named tuples that makes another one, public in spite of its name",
    "_constant_buffered_norm2": "DeepSpeed: with match_stock its own functions compute the norm",
    "_get_norm_groups": "DeepSpeed: likewise",
    "_opt_called": "torch: its schedulers look there whether step() was called, which under DeepSpeed it is not",
    "_optimizer_step_pre_hooks": "torch: nothing public says that there are hooks, which would not be called",
    "_optimizer_step_post_hooks": "torch: likewise",
}
# The only file that may read them.
READ_IN = {
    "_constant_buffered_norm2": "optimizer.py",
    "_get_norm_groups": "optimizer.py",
    "_opt_called": "inner_optimizer.py",
    "_optimizer_step_pre_hooks": "inner_optimizer.py",
    "_optimizer_step_post_hooks": "inner_optimizer.py",
}
# Attributes of others that are assigned.
ASSIGNED = {
    "__cause__": "Python: an error says which one came before it",
    "grad": "torch: p.grad is the user's, and a placeholder has to stand there",
    "grad_dtype": "torch: p.grad_dtype is where autograd looks for the dtype of gradients",
    "_opt_called": "torch: as above",
    "superoffload_steps_it": "DeepSpeed: its function that clips gets parameters alone, so each says what steps it",
    "loader": "Python: a finder of modules answers with a spec whose loader it may replace",
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


def file_of(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def written_above(path: Path, name: str) -> list[str]:
    """As ``ours_above()``, from the source alone: what DeepSpeed's classes are is not asked here."""
    body = parsed(path).body
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases]
            if "Protocol" in bases:
                return []
            return [name, *(above for base in bases for above in written_above(path, base))]
    module, _, rest = name.rpartition(".")
    for node in body:
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("superoffload"):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return written_above(file_of(str(node.module)), alias.name)
            if module and (alias.asname or alias.name) == module:
                return written_above(file_of(f"{node.module}.{alias.name}"), rest)
    return []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_class_has_at_most_one_class_of_ours_above_it(path: Path) -> None:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef):
            above = written_above(path, node.name)[1:]
            assert len(above) <= 1, (node.name, above)


def test_deepspeeds_optimizer_is_alone_above_ours() -> None:
    (node,) = (node for node in parsed(STAGE3).body if isinstance(node, ast.ClassDef))
    assert node.name == "SpeculativeStage3"
    assert [ast.unparse(base) for base in node.bases] == ["DeepSpeedZeroOptimizer_Stage3"]
    assert written_above(STAGE3, node.name) == ["SpeculativeStage3"]


@pytest.mark.parametrize("path", sorted(set(STAGE3.parent.glob("*.py")) - {STAGE3}), ids=name_of)
def test_no_part_of_the_adapter_knows_the_class_that_owns_it(path: Path) -> None:
    if path.name != "__init__.py":  # which says what is public
        names = {node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.alias)}
        names |= {node.id for node in ast.walk(parsed(path)) if isinstance(node, ast.Name)}
        assert not names & {"SpeculativeStage3", "DeepSpeedZeroOptimizer_Stage3"}


@pytest.mark.parametrize("one", [superoffload.AdamW, superoffload.CPUAdamW])
def test_optimizers_inherit_from_torchs_alone(one: type) -> None:
    assert one.__bases__ == (torch.optim.Optimizer,)
    assert ours_above(one) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_are_read_by_their_owner_only(path: Path) -> None:
    found = [
        f"{ast.unparse(node)}, line {node.lineno}"
        for node in private_reads(parsed(path))
        if node.attr not in READ or path.name != READ_IN.get(node.attr, path.name)
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


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
