"""Digests of all state, which are the same exactly where all bits are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from superoffload.engine.bucket import Shard


def digests_of(shards: Sequence[Shard]) -> dict[str, str]:
    """SHA-256 over all shards in their order: masters, moments and published parameters."""
    columns: dict[str, Callable[[Shard], Tensor]] = {
        "master": lambda shard: shard.master,
        "exp_avg": lambda shard: shard.exp_avg,
        "exp_avg_sq": lambda shard: shard.exp_avg_sq,
        "published": lambda shard: shard.target(),
    }
    result = {}
    for name, column in columns.items():
        digest = hashlib.sha256()
        for shard in shards:
            if shard.numel == 0:  # nothing to digest, and without strides that a view needs
                continue
            digest.update(column(shard).to("cpu").contiguous().view(torch.uint8).numpy().data)
        result[name] = digest.hexdigest()
    return result
