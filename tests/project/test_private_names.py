"""Private names of other projects that the package relies on: all of them are listed here, and each still exists.

A test that fails here names what a new version of a project no longer has, and who uses it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

_FSDP = "torch.distributed.fsdp._fully_shard"
_STAGE3 = "deepspeed/runtime/zero/stage3.py"
# A name, and the module or class that has it or whose source does; of projects that load slowly, the file.
NAMES = {
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "_ActionsContainer": "argparse",
    "_C": "torch",
    "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition": _STAGE3,
    "_cdata": "torch.UntypedStorage",
    "_clip_grad_norm": "transformers/trainer.py",
    "_comm_ctx": f"{_FSDP}._fsdp_state",
    "_compiled_call_impl": "torch.nn.Module",
    "_config": "deepspeed/runtime/engine.py",
    "_configure_zero_optimizer": "deepspeed/runtime/engine.py",
    "_constant_buffered_norm2": _STAGE3,
    "_current_graph_task_id": "torch._C",
    "_execution_engine": "torch.autograd.Variable",
    "_dynamo": "torch",
    "_exit": "os",
    "_foreach_add_": "torch",
    "_foreach_copy_": "torch",
    "_fsdp_param_group": f"{_FSDP}._fsdp_state",
    "_fsdp_param_groups": "",  # of later versions of torch than those that are pinned; looked up with a default
    "_generate": "trl/trainer/grpo_trainer.py",
    "_get_default_store": "torch.distributed.distributed_c10d",
    "_get_fsdp_state": f"{_FSDP}._fully_shard",
    "_get_grad_norm": "transformers/trainer.py",
    "_get_norm_groups": _STAGE3,
    "_getframe": "sys",
    "_hp_mapping": "deepspeed/utils/tensor_fragment.py",
    "_init_mp_dtypes": f"{_FSDP}._fsdp_param_group",
    "_load_optimizer_and_scheduler": "transformers/trainer.py",
    "_save_optimizer_and_scheduler": "transformers/trainer.py",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_make_wrapper_subclass": "torch.Tensor",
    "_modules": "torch.nn.Module",
    "_opt_called": "torch.optim.lr_scheduler",
    "_optimizer_step_post_hooks": "torch.optim.optimizer",
    "_optimizer_step_pre_hooks": "torch.optim.optimizer",
    "_orig_dtype": f"{_FSDP}._fsdp_param_group",
    "_spec": "torch.distributed.tensor.DTensor",
    "_update_scale": "deepspeed/runtime/zero/stage_1_and_2.py",
    "_states_to_backward_prefetch": f"{_FSDP}._fsdp_state",
    "_states_to_forward_prefetch": f"{_FSDP}._fsdp_state",
    "trace_rules": "torch._dynamo",
    "tree_leaves": "torch.utils._pytree",
}
_SET_BY_US = {"_kept_by_superoffload"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def definitions(tree: ast.AST) -> Iterator[str]:
    """Names that a module of ours defines, and attributes that it reads of or gives to ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr


def uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from [node.attr] if private(node.attr) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            yield from [name] if isinstance(name, str) and private(name) else []
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith(("superoffload", "_")):
            hidden = any(private(part) for part in node.module.split("."))
            yield from [each.name for each in node.names if hidden or private(each.name)]


def test_every_private_name_of_another_project_is_listed() -> None:
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "superoffload").rglob("*.py")}
    ours = {name for tree in trees.values() for name in definitions(tree)} | _SET_BY_US
    found = {name: str(path.relative_to(ROOT)) for path, tree in trees.items() for name in uses(tree)}
    theirs = {name: path for name, path in found.items() if name not in ours}
    assert theirs.keys() - NAMES.keys() == set(), {name: theirs[name] for name in theirs.keys() - NAMES.keys()}
    assert NAMES.keys() - theirs.keys() == set(), "nothing uses these any more"


@pytest.mark.parametrize("name", [name for name, place in NAMES.items() if place])
def test_it_still_exists(name: str) -> None:
    place = NAMES[name]
    project = re.split("[./]", place)[0]
    spec = importlib.util.find_spec(project)
    if spec is None:
        pytest.skip(f"needs {project}: pip install {project}")
    if place.endswith(".py"):
        (folder,) = spec.submodule_search_locations or [""]
        has, source = False, (Path(folder).parent / place).read_text()
    else:
        there = pkgutil.resolve_name(place)
        has = hasattr(there, name)
        source = "" if has else inspect.getsource(sys.modules[getattr(there, "__module__", place)])
    written = name.removeprefix("_DeepSpeedZeroOptimizer_Stage3")
    assert has or re.search(rf"\b{written}\b", source), f"{place}: this version of {project} has no {name}"
