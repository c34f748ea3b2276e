"""Makes the meshes of the engines that lay a model over pairs of ranks: tp, pp and ep."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from superoffload.errors import ArgumentError

PAIR = 2  # ranks that share each matrix, stages of a pipeline, ranks that share the experts
_WHY = {
    "tp": "two ranks share each matrix",
    "pp": "the model has two stages, each on as many ranks",
    "ep": "two ranks share the experts",
}
_made: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def check_pairs(engine: str, count: int) -> None:
    """Raises ArgumentError if ``engine`` takes pairs of ranks, and ``count`` ranks are not pairs."""
    if engine in _WHY and count % PAIR:
        raise ArgumentError(f"engine={engine} with ranks={count}: {_WHY[engine]}; expected an even number")


def mesh_of(**sizes: int) -> Any:
    """Returns the mesh with these dimensions over all ranks. It is made once per process group: each one makes groups
    whose threads poll as long as the process lives."""
    from torch.distributed.device_mesh import init_device_mesh

    known = _made.setdefault(dist.group.WORLD, {})
    key = tuple(sizes.items())
    if key not in known:
        known[key] = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return known[key]
