"""``torch.distributed.fsdp.fully_shard``: what users may ask for; ``superoffload.AdamW`` needs nothing of it."""

from __future__ import annotations

import torch
from torch import nn

from superoffload.errors import ArgumentError
from superoffload.optimizer.grad_dtypes import GradDtypes
from superoffload.ranks.kept_reductions import KeptGroup, all_groups


def keep_reduced_gradients(model: nn.Module) -> None:
    """Keeps the gradients of what ``fully_shard`` has sharded in fp32 where the policy reduces them in fp32.

    torch (2.13 and before) rounds them to the dtype of the sharded parameter behind the reduction; a bf16 model loses
    there what ``reduce_dtype=torch.float32`` was to save. To be called after ``fully_shard`` and before the optimizer
    is made, which takes them as they are; ``AdamW(accumulate_dtype="fp32", model=model)`` does it by itself. Costs 2
    more bytes per parameter of this rank, here and there.
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
