"""Refuses features that would give wrong results, before DeepSpeed's optimizer is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from superoffload.engine.bucket import ELEMENT_TYPES, GroupHyper
from superoffload.errors import ArgumentError
from superoffload.integrations.deepspeed.config import LEANER_MASTERS, LEANER_MOMENTS
from superoffload.optimizer.arguments import check_hyper_parameters


def check_optimizer(optimizer: Any, cpu_adam: type) -> None:
    """Accepts Adam and AdamW of torch and of DeepSpeed; exactly those types, since a subclass may step differently."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, cpu_adam):
        raise ArgumentError(
            f'optimizer {type(optimizer).__name__}: expected "Adam" or "AdamW" in the config, torch.optim.Adam, '
            "torch.optim.AdamW or deepspeed.ops.adam.DeepSpeedCPUAdam; for another one set "
            '"offload_optimizer": {"device": "cpu"}'
        )
    if not getattr(optimizer, "fp32_optimizer_states", True):
        raise ArgumentError(f"fp32_optimizer_states=False: expected true; {LEANER_MOMENTS}")
    for index, group in enumerate(optimizer.param_groups):
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise ArgumentError(f"param_groups[{index}]: {name}={group[name]!r}: expected False")
        check_hyper_parameters(group)


def hyper_of(optimizer: Any, group: int) -> GroupHyper:
    """Reads a param group's present hyper-parameters."""
    values = optimizer.param_groups[group]
    check_hyper_parameters(values)
    beta1, beta2 = values["betas"]
    return GroupHyper(
        lr=float(values["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(values["eps"]),
        weight_decay=float(values["weight_decay"]),
        l2=not _decoupled(optimizer, values),
        bias_correction=bool(values.get("bias_correction", True)),
    )


def _decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Tells whether weight decay is decoupled from the gradient (AdamW)."""
    if isinstance(optimizer, torch.optim.AdamW):
        return True
    if isinstance(optimizer, torch.optim.Adam):
        return bool(group.get("decoupled_weight_decay", False))
    return bool(optimizer.adam_w_mode)


_OFF: dict[str, Any] = {"zero_hpz_partition_size": 1}  # means off, like None and False; by name, since True == 1


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Checks the keyword arguments of DeepSpeed's ZeRO-3 optimizer."""
    refused = {
        "zenflow_config": "ZenFlow is another optimizer schedule; remove it",
        "all2all_process_group": "quantized gradients are not supported; remove zero_quantized_gradients",
        "zero_hpz_partition_size": "expected 1; the second copy of the parameters is not kept up to date",
        "zero_quantized_weights": "quantized weights are not supported; remove the key",
        "zero_quantized_nontrainable_weights": "quantized weights are not supported; remove the key",
        "fp16_master_weights_and_gradients": "master weights are fp32; remove the key",
        "bf16_master_weights_and_gradients": LEANER_MASTERS,
        "bf16_optimizer_states": LEANER_MOMENTS,
        "elastic_checkpoint": "DeepSpeed itself refuses it for stage 3; use universal checkpoints",
    }
    for name, advice in refused.items():
        value = arguments.get(name)
        if value and value != _OFF.get(name):
            raise ArgumentError(f"{name}={value!r} together with superoffload: {advice}")
    mpu = arguments.get("mpu")
    if mpu is not None and not hasattr(mpu, "initialize_sequence_parallel"):
        raise ArgumentError(f"mpu={type(mpu).__name__}: model parallelism is not supported together with superoffload")
    dtype = arguments.get("gradient_accumulation_dtype", torch.float32)
    if dtype not in ELEMENT_TYPES:
        raise ArgumentError(f"grad_accum_dtype={dtype}: expected fp32, bf16 or fp16")


def check_groups_alike(parameters: Any, process_group: Any) -> None:
    """Checks that all parameters are partitioned over the same ranks, so that one verdict serves all."""
    expected = dist.get_process_group_ranks(process_group)
    for parameter in parameters:
        ranks = dist.get_process_group_ranks(getattr(parameter, "ds_process_group", process_group))
        if ranks != expected:
            raise ArgumentError(
                f"a parameter of shape {tuple(parameter.ds_shape)} is partitioned over ranks {ranks}, others over "
                f"{expected} (expert or tensor parallelism), which is not supported together with "
                "superoffload; ZeRO-3 leaf modules work (deepspeed.utils.set_z3_leaf_modules)"
            )
