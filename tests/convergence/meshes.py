"""Makes meshes, and puts layers on them. Engines tp, pp and ep lay a model over pairs of ranks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from superoffload.errors import ArgumentError

PAIR = 2  # ranks that share each matrix, stages of a pipeline, ranks that share the experts
_WHY = {
    "tp": "two ranks share each matrix",
    "pp": "the model has two stages, each on as many ranks",
    "ep": "two ranks share the experts",
}
_made: WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = WeakKeyDictionary()


def check_pairs(engine: str, count: int) -> None:
    """Raises ArgumentError if ``engine`` takes pairs of ranks, and ``count`` ranks are not pairs."""
    if engine in _WHY and count % PAIR:
        raise ArgumentError(f"engine={engine} with ranks={count}: {_WHY[engine]}; expected an even number")


def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Returns the mesh with these dimensions over all ranks. It is made once per process group: each one makes groups
    whose threads poll as long as the process lives."""
    known = _made.setdefault(dist.group.WORLD, {})
    if (sizes, names) not in known:
        known[sizes, names] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return known[sizes, names]


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
