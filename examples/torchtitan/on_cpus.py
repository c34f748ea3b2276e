"""Starts torchtitan's own train.py on processors: its Trainer, models and checkpoints, over gloo.

    torchrun --nproc-per-node 2 examples/torchtitan/on_cpus.py --module text_models --config llama \
        --override.imports superoffload.integrations.torchtitan.offload superoffload.integrations.torchtitan.metrics

torchtitan 0.3.0 is written for GPUs and for a nightly torch. ``prepare()`` lists what is changed here, for the rest of
the process, in torch and in torchtitan; ``without_flex_attention()`` changes a model. Nothing of it is needed, or done,
on GPUs, where ``torchtitan.train`` takes the same arguments.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from dataclasses import fields
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules


@functools.cache
def prepare() -> None:
    """Lets torchtitan run on processors. Call it before torchtitan is imported; a second call changes nothing."""
    torch.set_num_threads(1)
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes "cuda" where there is no accelerator
    if find_spec("triton") is None:
        _leave_triton_out()
    _sum_with_gloo()
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        _take_micro_batches(kind)
    _measure_no_device()


def without_flex_attention(spec: Any) -> Any:
    """Replaces FlexAttention in a model's ``spec``, whose backward needs a GPU, by torch's attention; returns it."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    known = {field.name for field in fields(ScaledDotProductAttention.Config)}
    for _, flex, parent, name in spec.model.traverse(FlexAttention.Config):
        kept = {field.name: getattr(flex, field.name) for field in fields(flex) if field.name in known}
        setattr(parent, name, ScaledDotProductAttention.Config(**kept))
    return spec


def _leave_triton_out() -> None:
    """Lets modules be imported that define Triton kernels, which are not called here."""

    class NoTriton(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: args[0] if len(args) == 1 and not kwargs else (lambda function: function)

    for name in ("triton", "triton.language"):
        sys.modules[name] = NoTriton(name)
    vars(sys.modules["triton"])["language"] = sys.modules["triton.language"]
    import_module("torchtitan.distributed.minimal_async_ep")
    for name in ("triton", "triton.language"):
        del sys.modules[name]


def _sum_with_gloo() -> None:
    """gloo has no sum with a factor, which fully_shard uses after ``set_gradient_divide_factor``."""
    patched: Any = FSDPModule
    real = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: FSDPModule, factor: float) -> None:
        real(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    patched.set_gradient_divide_factor = set_gradient_divide_factor


def _take_micro_batches(kind: Any) -> None:
    """torch 2.13 splits a batch itself; the nightly that torchtitan is written for takes micro-batches."""
    real = kind.step
    if "arg_mbs" in inspect.signature(real).parameters:
        return

    def step(
        self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **rest: Any
    ) -> Any:
        if kwarg_mbs is None:
            return real(self, *args, **rest)
        inputs = [] if arg_mbs is None else [torch.cat([batch for (batch,) in arg_mbs])]
        others = {name: torch.cat([batch[name] for batch in kwarg_mbs]) for name in kwarg_mbs[0]}
        target = None if target_mbs is None else torch.cat(target_mbs)
        return real(self, *inputs, target=target, **rest, **others)

    kind.step = step


def _measure_no_device() -> None:
    """torch.cpu has neither memory statistics nor device numbers."""
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    class NoMemory:
        device_name = "cpu"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None:
            pass

    def set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
        torch.distributed.barrier()

    metrics.build_device_memory_monitor = NoMemory
    utils.set_pg_timeouts = set_pg_timeouts


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where text_models is
    prepare()
    from torchtitan.train import main

    main()
