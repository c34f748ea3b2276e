"""The shape of classes: at most one class of ours above another, private names and attributes of their owner."""

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
FILES = sorted(PACKAGE.rglob("*.py"))
FSDP2 = ("distributed/fully_shard.py", "distributed/kept_reductions.py")
INNER_OPTIMIZER = ("integrations/deepspeed/stage3/inner_optimizer.py",)
STAGE3_OPTIMIZER = ("integrations/deepspeed/stage3/optimizer.py",)
TRANSFORMERS = ("integrations/transformers.py",)
TORCHTITAN = ("integrations/torchtitan.py",)
TORCHTITAN_ON_CPUS = ("integrations/torchtitan_on_cpus.py",)
TITAN_TRAINER = ("tools/convergence/titan_trainer.py",)
MEGATRON = ("integrations/megatron.py",)
AXOLOTL = ("integrations/axolotl.py",)

# Private names of others that are read: the reason why there is no other way, and the only files that may (none: all).
READ: dict[str, tuple[str, tuple[str, ...]]] = {
    "_ActionsContainer": ("argparse: what a parser and a group of its arguments have in common", ("tools/",)),
    "_C": (
        "torch: what calls a function without __torch_function__, and whether backward runs",
        ("optimizer/packed_gradient.py", "distributed/data_parallel.py"),
    ),
    "_actions": ("argparse: nothing public lists a parser's options", ("tools/cli/verify_ranks.py",)),
    "_build_llama3_layers": ("torchtitan: nothing public makes layers of other sizes", TITAN_TRAINER),
    "_cdata": ("torch: the only identity of a storage that does not keep it alive", ("optimizer/tracked_param.py",)),
    "_clip_grad_norm": ("transformers: no callback may clip in the Trainer's place", TRANSFORMERS),
    "_comm_ctx": ("torch: the streams of FSDP2", FSDP2),
    "_constant_buffered_norm2": ("DeepSpeed: with match_stock its own functions compute the norm", STAGE3_OPTIMIZER),
    "_current_graph_task_id": ("torch: of the backward that runs", ("distributed/data_parallel.py",)),
    "_execution_engine": ("torch: runs a callback when backward ends", ("distributed/data_parallel.py",)),
    "_exit": ("Python: ends a process, public in spite of its name", ()),
    "_foreach_add": ("torch: counts the steps of many parameters in one call", ("cpu_adamw.py",)),
    "_foreach_copy_": ("torch: many copies in one call", ("links/",)),
    "_fsdp_param_group": ("torch: what FSDP2 gathers and reduces together", FSDP2),
    "_generate": ("TRL: what its trainers generate with, while the optimizer may sleep", TRANSFORMERS),
    "_get_available_device_type": ("torch: where torchtitan learns on what to train", TORCHTITAN_ON_CPUS),
    "_get_fsdp_state": ("torch: what FSDP2 knows of a module", FSDP2),
    "_get_grad_norm": ("transformers: the norm that the Trainer logs", TRANSFORMERS),
    "_get_norm_groups": ("DeepSpeed: likewise", STAGE3_OPTIMIZER),
    "_init_mp_dtypes": ("torch: where FSDP2 learns the dtypes it reduces in", FSDP2),
    "_kept_by_superoffload": ("ours, on an object of FSDP2's", FSDP2),
    "_local_tensor": (
        "torch: a DTensor's local part itself, which to_local() only shows",
        ("optimizer/packed_gradient.py",),
    ),
    "_make_wrapper_subclass": ("torch: makes a tensor without memory", ("optimizer/packed_gradient.py",)),
    "_modules": ("torch: the modules that FSDP2 shards together", FSDP2),
    "_opt_called": ("torch: its schedulers look there whether step() was called", INNER_OPTIMIZER),
    "_optimizer_step_post_hooks": ("torch: nothing public says that there are hooks", INNER_OPTIMIZER),
    "_optimizer_step_pre_hooks": ("torch: likewise", INNER_OPTIMIZER),
    "_orig_dtype": ("torch: the dtype to which FSDP2 rounds what it has reduced", FSDP2),
    "_replace": ("Python: makes another named tuple, public in spite of its name", ()),
    "_spec": ("torch: what a DTensor is made from", ("distributed/ownership.py", "optimizer/packed_gradient.py")),
    "_states_to_backward_prefetch": ("torch: what FSDP2 gathers ahead", FSDP2),
    "_states_to_forward_prefetch": ("torch: likewise", FSDP2),
    "_utils": ("torch: likewise", TORCHTITAN_ON_CPUS),
    "_version": ("torch: the counter of writes to a tensor, which has no other name", ()),
}
# Attributes of others that are assigned, likewise.
ASSIGNED: dict[str, tuple[str, tuple[str, ...]]] = {
    "__cause__": ("Python: an error says which one came before it", ()),
    "CPUAdam": ("Megatron: the name of the class that it steps with on the CPU", MEGATRON),
    "create_optimizer": ("axolotl: its mixin's would make other groups for our optimizer", AXOLOTL),
    "clip_grad_norm_": ("torchtitan: the function that its Trainer clips with", TORCHTITAN),
    "_clip_grad_norm": ("transformers: no callback may clip in the Trainer's place", TRANSFORMERS),
    "_generate": ("TRL: what its trainers generate with, while the optimizer may sleep", TRANSFORMERS),
    "_get_available_device_type": ("torch: where torchtitan learns on what to train", TORCHTITAN_ON_CPUS),
    "_get_grad_norm": ("transformers: the norm that the Trainer logs", TRANSFORMERS),
    "_init_mp_dtypes": ("torch: where FSDP2 learns the dtypes it reduces in", FSDP2),
    "_kept_by_superoffload": ("ours, on an object of FSDP2's", FSDP2),
    "_local_tensor": (
        "torch: the local part of a DTensor is replaced, not the DTensor",
        ("optimizer/packed_gradient.py",),
    ),
    "_opt_called": ("torch: its schedulers look there whether step() was called", INNER_OPTIMIZER),
    "_orig_dtype": ("torch: the dtype to which FSDP2 rounds what it has reduced", FSDP2),
    "skip_nnmodule_hook_guards": ("torch: whether Dynamo looks for hooks again", ("optimizer/compiling.py",)),
    "step_was_skipped": ("Accelerate: its schedulers ask there", ("optimizer/accelerate_window.py",)),
    "build_device_memory_monitor": ("torchtitan: what measures the memory of a GPU", TORCHTITAN_ON_CPUS),
    "clip_grad": ("DeepSpeed: its optimizer keeps the threshold there", ("tools/convergence/zero3.py",)),
    "data": (
        "torch: changes the dtype, or the memory, of a parameter",
        ("tools/train/model.py", "integrations/deepspeed/stage3/sub_group_state.py"),
    ),
    "grad": ("torch: p.grad is the user's, and a placeholder has to stand there", ()),
    "grad_added_to_main_grad": ("Megatron: says that p.main_grad has the gradient", ("optimizer/gradient_source.py",)),
    "grad_dtype": ("torch: p.grad_dtype is where autograd looks", ("optimizer/grad_dtypes.py",)),
    "loader": (
        "Python: a finder of modules may replace it in a spec",
        ("integrations/deepspeed/inject/sitecustomize.py",),
    ),
    "logger": ("torchtitan: where its metrics go", TITAN_TRAINER),
    "max_grad_norm": ("ours: users set it", ()),
    "max_norm": ("torchtitan: the norm that its Trainer clips to", TITAN_TRAINER),
    "optimizer_cls_and_kwargs": ("transformers: what its Trainer makes optimizers from", TRANSFORMERS),
    "set_gradient_divide_factor": ("torch: gloo has no sum with a factor", TORCHTITAN_ON_CPUS),
    "set_pg_timeouts": ("torchtitan: sets time-outs on devices with numbers", TORCHTITAN_ON_CPUS),
    "step": ("torch: a schedule gets its batch in another form than torchtitan gives it", TORCHTITAN_ON_CPUS),
    "superoffload_steps_it": ("DeepSpeed: its function that clips gets parameters alone", STAGE3_OPTIMIZER),
    "way_back": ("torch: what an autograd function keeps for backward", ("tools/convergence/expert_parallel.py",)),
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
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return source if source.exists() else path.with_suffix(".pyi")


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


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "errors.py"], ids=name_of)  # a hierarchy
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


def is_exception(name: str, path: Path, exceptions: dict[str, tuple[str, tuple[str, ...]]]) -> bool:
    _, files = exceptions.get(name, ("", ("nowhere",)))
    return not files or path.relative_to(PACKAGE).as_posix().startswith(files)


def said(node: ast.Attribute) -> str:
    return f"{ast.unparse(node)}, line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_are_read_by_their_owner_only(path: Path) -> None:
    assert not [said(node) for node in private_reads(parsed(path)) if not is_exception(node.attr, path, READ)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_attributes_are_assigned_by_their_owner_only(path: Path) -> None:
    assert not [said(node) for node in assigned(parsed(path)) if not is_exception(node.attr, path, ASSIGNED)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_has_at_most_600_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 600


def test_every_exception_is_needed() -> None:
    read = {node.attr for path in FILES for node in private_reads(parsed(path))}
    written = {node.attr for path in FILES for node in assigned(parsed(path))}
    assert (set(READ) - read, set(ASSIGNED) - written) == (set(), set())


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
