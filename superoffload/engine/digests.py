"""Computes SHA-256 digests of masters, moments and parameters: equal digests mean equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from superoffload.engine.bucket import Shard
from superoffload.engine.moments import read_exp_avg, read_exp_avg_sq


def digests_of(shards: Sequence[Shard]) -> dict[str, str]:
    """Returns SHA-256 digests of masters, moments and published parameters, over all shards in their order."""
    columns: dict[str, Callable[[Shard], Tensor]] = {
        "master": lambda shard: shard.read_masters(),
        "exp_avg": read_exp_avg,
        "exp_avg_sq": read_exp_avg_sq,
        "published": lambda shard: shard.target(),
    }
    result = {}
    for name, column in columns.items():
        digest = hashlib.sha256()
        for shard in shards:
            if shard.numel == 0:  # view() refuses the strides of an empty tensor
                continue
            digest.update(column(shard).to("cpu").contiguous().view(torch.uint8).numpy().data)
        result[name] = digest.hexdigest()
    return result
