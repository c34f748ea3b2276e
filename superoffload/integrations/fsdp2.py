"""Adapts ``torch.distributed.fsdp.fully_shard`` where users ask for it; ``superoffload.AdamW`` does not need it."""

from __future__ import annotations

import torch
from torch import nn

from superoffload.distributed.fully_shard import KeptGroup, all_groups
from superoffload.errors import ArgumentError
from superoffload.optimizer.fp32_accumulation import GradDtypes


def keep_reduced_gradients(model: nn.Module) -> None:
    """Keeps the gradients of sharded parameters in fp32 if the policy reduces them in fp32.

    torch (2.13 and before) rounds them to the dtype of the sharded parameter after the reduction, so a bf16 model loses
    the precision of ``reduce_dtype=torch.float32``. Call this after ``fully_shard`` and before making the optimizer;
    ``AdamW(accumulate_dtype="fp32", model=model)`` does it by itself. It costs 2 more bytes per parameter of this rank,
    on the device and on the host.
    """
    groups = all_groups(model)
    if not groups:
        raise ArgumentError(f"model: {type(model).__name__}, of which nothing is sharded; call fully_shard before this")
    kept = [group for group in groups if group.mp_policy.reduce_dtype is torch.float32]
    if not kept:
        raise ArgumentError(
            "model: fully_shard was called without MixedPrecisionPolicy(reduce_dtype=torch.float32), so that there are "
            "no fp32 gradients that could be kept; pass it as mp_policy="
        )
    for group in kept:
        KeptGroup.hold(group, GradDtypes)
