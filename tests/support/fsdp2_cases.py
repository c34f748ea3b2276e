"""Ways to shard a model with fully_shard, and one run of training over it: clipped once, poisoned once."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.rank_processes import Net, data_rank, flat_mesh, net, replica_mesh, shard, tokens_of

STEPS = 5
CLIPPED, POISONED = 2, 3  # steps, from 0


@dataclass(frozen=True)
class Case:
    """How a model is sharded and trained. ``prefetch``: blocks that each gathers ahead of time; ``grouped``: the ends
    are gathered together; ``unshards``: the loop gathers by hand; ``evaluates``: behind every step."""

    dtype: torch.dtype = torch.float32
    policy: Any = None
    replicas: bool = False
    tied: bool = False
    layers: int = 2
    width: int = 0
    reshard: bool = True
    micro_batches: int = 1
    checkpointing: bool = False
    compiled: bool = False
    meta: bool = False
    prefetch: int = 0
    grouped: bool = False
    unshards: bool = False
    evaluates: bool = False
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"
    rank_check: Any = "off"

    @property
    def kinds(self) -> dict[str, Any]:
        return {"state_dtype": self.state_dtype, "master_dtype": self.master_dtype}

    def whole(self) -> Net:
        return net(self.dtype, tied=self.tied, layers=self.layers, width=self.width)


def build(case: Case) -> Any:
    model: Any = case.whole()
    values = copy.deepcopy(model.state_dict())
    if case.meta:
        with torch.device("meta"):
            model = Net(tied=case.tied, layers=case.layers, width=case.width).to(case.dtype)
        model.frozen.requires_grad_(False)
    if case.checkpointing:
        model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
    if case.compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    if case.grouped:
        for part in (*model.layers, [model.embedding, model.head], model):
            fully_shard(part, mesh=flat_mesh())
    else:
        mesh = replica_mesh() if case.replicas else flat_mesh()
        model = shard(model, mesh, case.policy, reshard_after_forward=case.reshard)
    if case.meta:
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        for name, param in model.named_parameters():
            whole = values[name]
            (place,) = (i for i, p in enumerate(param.placements) if p.is_shard())
            share = whole.chunk(param.device_mesh.size(place))
            mine = param.device_mesh.get_local_rank(place)
            with torch.no_grad():
                param.to_local().copy_(share[mine] if mine < len(share) else whole[:0])
    layers = list(model.layers)
    for i, layer in enumerate(layers if case.prefetch else ()):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + case.prefetch])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - case.prefetch) : i][::-1])
    if case.prefetch:
        model.set_modules_to_forward_prefetch(layers[: case.prefetch])
    return model


def train(
    model: Any, optimizer: Any, case: Case, *, world: int = 0, lands: bool = False, steps: int = STEPS
) -> list[float]:
    """As a user would. ``world``: one process has the rows of so many ranks. The poisoned step has a NaN in a gradient
    of the last rank only. ``lands``: a delivery must be on its way when ``step()`` returns."""
    losses = []
    sharded = isinstance(model, FSDPModule)

    def loss_of(seed: int) -> Tensor:
        ranks = range(world) if world else (data_rank(),)
        return torch.stack([model.loss(tokens_of(seed, rank)) for rank in ranks]).mean()

    for step in range(steps):
        optimizer.max_grad_norm = 50.0
        optimizer.zero_grad()
        if case.unshards and sharded:
            model.layers[0].unshard(async_op=True)
        for micro in range(case.micro_batches):
            if sharded:
                model.set_requires_gradient_sync(micro + 1 == case.micro_batches)
            loss = loss_of(step * case.micro_batches + micro) / case.micro_batches
            loss.backward()
            losses.append(loss.item())
        if step == POISONED:
            poison(model, alone=bool(world))
        if step == CLIPPED:  # set this late it finds every bucket speculated
            optimizer.max_grad_norm = 0.05
        optimizer.step()
        if lands and step > (0 if sharded else 1) and step != POISONED:
            assert optimizer._engine.last_step.is_landing
        if case.evaluates:
            with torch.no_grad():
                losses.append(loss_of(100 + step).item())
            if sharded:
                model.reshard()
    return losses


def poison(model: nn.Module, *, alone: bool = False) -> None:
    last = alone or dist.get_rank() == dist.get_world_size() - 1
    for param in model.parameters():
        if param.grad is None:
            continue
        local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if local.numel() and (last or not isinstance(param.grad, DTensor)):
            local.view(-1)[local.numel() // 2] = math.nan
            return
