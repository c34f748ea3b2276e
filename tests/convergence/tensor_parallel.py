"""Trains with tensor parallelism on two ranks of each mesh, and ``fully_shard`` over the others, as engine ``tp``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.training.model import Transformer
from tests.convergence.engines import BaseEngine, Fsdp2, sharded
from tests.convergence.meshes import PAIR, mesh_of


class TensorParallel(Fsdp2):
    """Cuts every matrix of the transformer over two ranks, by rows or by columns; the norms are on both."""

    def wrap(self, model: Transformer) -> nn.Module:
        count = dist.get_world_size()
        mesh = mesh_of(data=count // PAIR, tensor=PAIR)
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


def parallelize(layer: nn.Module, mesh: Any, placement: Any) -> None:
    """Makes the parameters of one layer DTensors: Shard(0) of its outputs, Shard(1) of its inputs, or Replicate. Its
    input and output stay plain tensors, whole on every rank."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            placed = placement if param.dim() > 1 or placement != Shard(1) else Replicate()  # a bias has no inputs
            made = nn.Parameter(distribute_tensor(param.detach(), mesh, [placed]), param.requires_grad)
            module.register_parameter(key, made)

    def inputs(module: nn.Module, given: Any, mesh: Any) -> Any:
        return tuple(DTensor.from_local(one, mesh, [Replicate()], run_check=False) for one in given)

    def output(module: nn.Module, made: Any, mesh: Any) -> Any:
        return made.redistribute(placements=[Replicate()]).to_local().clone()  # fully_shard warns of views

    distribute_module(layer, mesh, partition, inputs, output)
