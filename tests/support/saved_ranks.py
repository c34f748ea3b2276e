"""A model of several ranks whose state is saved: sharded, replicated, or plain."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.rank_processes import Net, flat_mesh, net, replica_mesh, shard, tokens_of


def build(way: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Net, dict[str, Any]]:
    model = net(dtype, seed=seed, tied=True)
    leaner: dict[str, Any] = {
        "split masters": {"master_dtype": "split"},
        "8-bit moments": {"master_dtype": "split", "state_dtype": "8bit"},
    }
    if way in ("fsdp2", "replicas", *leaner):
        mesh = replica_mesh() if way == "replicas" else flat_mesh()
        return shard(model, mesh), leaner.get(way, {})
    return model, {"replicated": way}


def step(model: Net, optimizer: Any, seed: int) -> None:
    """Every rank has the same rows, so the global batch is the same for any number of ranks."""
    optimizer.zero_grad()
    model.loss(tokens_of(seed, 0)).backward()
    optimizer.step()
