"""Ways to shard a model with fully_shard, and one run of training over it: clipped once, poisoned once."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.support.rank_processes import (
    Net,
    flat_mesh,
    net,
    replica_mesh,
    shard,
    tokens_of,
)

STEPS = 5
CLIPPED, POISONED = 2, 3  # steps, from 0


@dataclass(frozen=True)
class Case:
    """How a model is sharded and trained."""

    dtype: torch.dtype = torch.float32
    policy: Any = None
    replicas: bool = False
    tied: bool = False
    layers: int = 2
    width: int = 13
    reshard: bool = True
    micro_batches: int = 1
    checkpointing: bool = False
    compiled: bool = False
    meta: bool = False
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"


def build(case: Case) -> Net:
    model = net(case.dtype, tied=case.tied, layers=case.layers, width=case.width)
    values = copy.deepcopy(model.state_dict())
    if case.meta:
        with torch.device("meta"):
            model = Net(tied=case.tied, layers=case.layers, width=case.width).to(case.dtype)
        for name in ("frozen",):
            getattr(model, name).requires_grad_(False)
    if case.checkpointing:
        model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
    if case.compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    mesh = replica_mesh() if case.replicas else flat_mesh()
    model = shard(model, mesh, case.policy, reshard_after_forward=case.reshard)
    if case.meta:
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            whole = values[name]
            (place,) = (i for i, p in enumerate(param.placements) if p.is_shard())
            share = whole.chunk(param.device_mesh.size(place))
            mine = param.device_mesh.get_local_rank(place)
            with torch.no_grad():
                param.to_local().copy_(share[mine] if mine < len(share) else whole[:0])
    return model


def train(model: Net, optimizer: Any, case: Case, rank: int, world: int) -> list[float]:
    """As a user would. The poisoned step has a NaN in one gradient of the last rank only."""
    losses = []
    for step in range(STEPS):
        optimizer.max_grad_norm = 50.0
        optimizer.zero_grad()
        loss = torch.zeros(())
        for micro in range(case.micro_batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro + 1 == case.micro_batches)
            seed = step * case.micro_batches + micro
            part = mean_loss(model, seed, rank, world) / case.micro_batches
            part.backward()
            loss = loss + part.detach()
        losses.append(loss.item())
        if step == POISONED:
            poison(model, rank, world)
        if step == CLIPPED:  # set this late it finds every bucket speculated
            optimizer.max_grad_norm = 0.05
        optimizer.step()
    return losses


def mean_loss(model: Net, seed: int, rank: int, world: int) -> Tensor:
    """Of this rank's rows; a single process has those of all ranks."""
    if isinstance(model, FSDPModule):
        return model.loss(tokens_of(seed, rank))
    return torch.stack([model.loss(tokens_of(seed, other)) for other in range(world)]).mean()


def poison(model: Net, rank: int, world: int) -> None:
    for param in model.parameters():
        if param.grad is None:
            continue
        local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if local.numel() and (rank == world - 1 or not isinstance(param.grad, DTensor)):
            local.view(-1)[local.numel() // 2] = math.nan
            return
