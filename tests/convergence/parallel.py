"""Trains with tensor or expert parallelism on two ranks of each mesh, as engines ``tp`` and ``ep``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.training.model import Transformer
from tests.convergence.engines import BaseEngine, Fsdp2, sharded
from tests.convergence.meshes import PAIR, mesh_of, parallelize
from tests.convergence.mixture import AllToAll, Experts


class TensorParallel(Fsdp2):
    """Cuts every matrix of the transformer over two ranks, by rows or by columns; the norms are on both."""

    def wrap(self, model: Transformer) -> nn.Module:
        count = dist.get_world_size()
        mesh = mesh_of(count // PAIR, PAIR, names=("data", "tensor"))
        _cut(model, mesh["tensor"])
        return model if count == PAIR else sharded(model, self.setup.dtype, mesh["data"])

    @property
    def share(self) -> tuple[int, int]:
        return dist.get_rank() // PAIR, dist.get_world_size() // PAIR  # two ranks have the same one

    def micro_batch(self, reduces: bool) -> AbstractContextManager[None]:
        return super().micro_batch(reduces) if dist.get_world_size() > PAIR else BaseEngine.micro_batch(self, reduces)


def _cut(model: Transformer, mesh: Any) -> None:
    """Makes the model's parameters DTensors on ``mesh``; activations between its layers are whole on every rank."""
    from torch.distributed.tensor import Replicate, Shard

    layers = {
        "attention_norm": Replicate(),
        "attention.qkv": Shard(0),
        "attention.out": Shard(1),
        "mlp_norm": Replicate(),
        "mlp.gate_up": Shard(0),
        "mlp.down": Shard(1),
    }
    parallelize(model.embedding, mesh, Shard(0))
    parallelize(model.head, mesh, Shard(0))
    parallelize(model.norm, mesh, Replicate())
    for block in model.blocks:
        for name, placement in layers.items():
            parallelize(block.get_submodule(name), mesh, placement)


class ExpertParallel(Fsdp2):
    """Spreads the experts over two ranks, and ``fully_shard`` over the others; all other parameters are sharded over
    all ranks. Each rank has tokens of its own, and an all-to-all takes them to their experts."""

    def wrap(self, model: Transformer) -> nn.Module:
        count = dist.get_world_size()
        mesh = mesh_of(count // PAIR, PAIR, names=("shard", "experts"))
        for experts in [module for module in model.modules() if isinstance(module, Experts)]:
            _spread(experts, mesh["experts"])
            sharded(experts, self.setup.dtype, mesh["shard"])
        return sharded(model, self.setup.dtype, mesh_of(count))


def _spread(experts: Experts, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    experts.exchange = AllToAll(mesh.get_group(), len(experts.gate_up) // mesh.size())
    for name, param in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
