"""Adapts Megatron-Core: the optimizer that its ``HybridDeviceOptimizer`` steps on the CPU becomes ``CPUAdamW``.

    import superoffload.integrations.megatron
    superoffload.integrations.megatron.enable()

After ``enable()``, ``optimizer_cpu_offload=True`` in an ``OptimizerConfig`` with ``optimizer="adam"`` gets our class
where Megatron names ``torch.optim.AdamW``; streams, copies, clipping and checkpoints stay Megatron's.
docs/frameworks.md#megatron-core has what is honoured and what is refused.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any

import torch

from superoffload.cpu_adamw import CPUAdamW
from superoffload.errors import ArgumentError, StateError
from superoffload.host.numbers import check_threads
from superoffload.optimizer.arguments import as_groups

VERSIONS = ("0.16.0", "0.16.1")  # the adapter's tests passed with each

_replaced: list[tuple[Any, str, Any]] = []
_threads: int | None = None


class HybridCPUAdamW(CPUAdamW, torch.optim.AdamW):
    """Steps what ``HybridDeviceOptimizer`` keeps on the CPU; takes params or param groups and nothing else.

    It is a ``torch.optim.AdamW`` too, since Megatron's ``DistributedOptimizer`` saves the number of steps only of
    those. Of torch's class it runs nothing but what completes an unpickled one.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, threads=_threads)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; refuses low-precision parameters without ``param_update_in_fp32``.

        ``HybridDeviceOptimizer`` loads state by torch's rule, which rounds it to the dtype of the parameter.
        """
        (group,) = as_groups([param_group])
        if not group.get("param_update_in_fp32", False):
            for param in group["params"]:
                if param.dtype != torch.float32:
                    raise ArgumentError(
                        f"param_update_in_fp32=False with a {param.dtype} parameter: HybridDeviceOptimizer would round "
                        f"exp_avg, exp_avg_sq and master to {param.dtype} when it loads a checkpoint; pass "
                        "param_update_in_fp32=True, as get_megatron_optimizer does"
                    )
        super().add_param_group(group)


def is_enabled() -> bool:
    """Tells whether new ``HybridDeviceOptimizer`` objects of Megatron step with our class at present."""
    return bool(_replaced)


def enable(*, threads: int | None = None) -> None:
    """Makes Megatron's CPU offload step with ``CPUAdamW`` in this process.

    Calling it again with the same ``threads`` changes nothing.

    Call it before ``get_megatron_optimizer``.

    Arguments:
        threads: worker threads, shared by all of its optimizers (None: one per core this process may use; with
            several ranks on a node give each its share).
    """
    global _threads
    check_threads("threads", threads)
    if _replaced:
        if threads != _threads:
            raise StateError(f"enable(threads={threads}): enabled already with threads={_threads}; disable() first")
        return
    try:
        core: Any = import_module("megatron.core")
        theirs: Any = import_module("megatron.core.optimizer")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        raise ArgumentError(
            "superoffload.integrations.megatron.enable(): megatron-core is not installed; pip install "
            f"'megatron-core=={VERSIONS[-1]}'"
        ) from None
    check_version(core.__version__)
    _check_names(theirs)
    _refuse_optimizers(theirs.HybridDeviceOptimizer)
    _threads = threads
    _replaced.append((theirs, "CPUAdam", theirs.CPUAdam))
    theirs.CPUAdam = HybridCPUAdamW


def disable() -> None:
    """Restores what ``enable()`` replaced. Existing optimizers keep our class."""
    while _replaced:
        owner, name, original = _replaced.pop()
        if getattr(owner, name) is HybridCPUAdamW:  # else another package has replaced ours, and keeps its own
            setattr(owner, name, original)


def check_version(version: str) -> None:
    """Refuses versions that were not tried, since the name that is replaced is private to Megatron's module."""
    if version.split("+")[0] not in VERSIONS:
        raise ArgumentError(
            f"megatron-core {version}: expected {' or '.join(VERSIONS)}, the versions this adapter was tested with; "
            f"pip install 'megatron-core=={VERSIONS[-1]}'"
        )


def _check_names(theirs: Any) -> None:
    """Checks that Megatron's module names the class that we replace."""
    found = getattr(theirs, "CPUAdam", None)
    if found is not torch.optim.AdamW:
        raise StateError(
            f"enable(): megatron.core.optimizer.CPUAdam is {found!r}, expected torch.optim.AdamW; another package has "
            "replaced it, or this Megatron differs from the release: restore it first"
        )


def _refuse_optimizers(hybrid: type) -> None:
    """Refuses optimizers that exist and step with torch's class, since they keep it."""
    gc.collect()
    for alive in gc.get_objects():
        if issubclass(type(alive), hybrid) and getattr(alive, "cpu_optimizer_cls", None) is torch.optim.AdamW:
            raise StateError(
                "enable(): a HybridDeviceOptimizer exists already and keeps torch.optim.AdamW; call enable() before "
                "get_megatron_optimizer(), or delete that optimizer first"
            )
