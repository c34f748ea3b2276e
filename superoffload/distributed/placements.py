"""Computes from the placements of a DTensor which box of the whole tensor this rank has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from superoffload.distributed.boxes import Box
from superoffload.errors import ArgumentError
from superoffload.host.tensors import local_of

_CUTTING = ("Shard", "_StridedShard")


def box_of(name: str, tensor: Any) -> Box:
    """Returns this rank's box of a DTensor with any number of Replicate, Shard and ``_StridedShard`` placements."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for placement in placements:
        _check(name, placement, placements)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ArgumentError(f"{name}: this rank is not in the parameter's mesh {mesh}; pass the parameters it has")
    box = box_at(name, tensor.shape, placements, mesh.shape, coordinate)
    local = tuple(local_of(tensor).shape)
    if local != box.lengths:
        raise ArgumentError(
            f"{name}: this rank's part has shape {local}, expected {box.lengths} of {tuple(tensor.shape)} with "
            f"placements {tuple(placements)} on a mesh of {tuple(mesh.shape)}; make it with distribute_tensor, "
            "parallelize_module or fully_shard"
        )
    return box


def box_at(
    name: str, shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """Returns the box of the rank that is at ``coordinate`` of a mesh of ``sizes``.

    ``fully_shard`` makes a ``_StridedShard`` where it cuts what tensor parallelism has cut already: it comes before the
    other in the mesh, but cuts after it. Its ``split_factor`` tells how many parts there were.
    """
    offsets, lengths = [], []
    for dim, size in enumerate(shape):
        offset, length = 0, int(size)
        for axis in _cuts(name, placements, sizes, dim, len(shape)):
            share = -(-length // sizes[axis])  # as torch.chunk cuts
            start = min(length, coordinate[axis] * share)
            offset, length = offset + start, min(share, length - start)
        offsets.append(offset)
        lengths.append(length)
    return Box(tuple(offsets), tuple(lengths))


def _check(name: str, placement: Any, placements: Sequence[Any]) -> None:
    if placement.is_partial():
        raise ArgumentError(
            f"{name}: placements {tuple(placements)}: each rank has a summand of the parameter (Partial), and only the "
            "sum can be trained; redistribute it to Replicate() or Shard(dim) before the optimizer is made"
        )
    if not (placement.is_replicate() or type(placement).__name__ in _CUTTING):
        raise ArgumentError(
            f"{name}: placements {tuple(placements)}, expected Replicate and Shard, as parallelize_module, fully_shard "
            "and distribute_tensor make them"
        )


def _cuts(name: str, placements: Sequence[Any], sizes: Sequence[int], dim: int, dims: int) -> list[int]:
    """Returns the dimensions of the mesh that cut ``dim`` of a tensor, in the order in which they cut it."""
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.is_replicate() or placement.dim % dims != dim:
            continue
        before, parts, wanted = 0, 1, getattr(placement, "split_factor", 1)
        while parts < wanted and before < len(order):
            parts *= sizes[order[before]]
            before += 1
        if parts != wanted:
            raise ArgumentError(
                f"{name}: {placement} in placements {tuple(placements)} on a mesh of {tuple(sizes)}: split_factor is "
                f"{wanted}, expected the number of parts that mesh dimensions after it cut before, as fully_shard sets "
                "it; else a rank's part is not one run of indices"
            )
        order.insert(before, axis)
    return order


# ---- verified -----------------------------------------------------------------------------------------------------


def check_strided(named: Iterable[tuple[str, Any]]) -> None:
    """Verifies, with torch's own gathering, that parts under ``_StridedShard`` are the runs that ``box_of`` says.

    ``_StridedShard`` is not documented, so its meaning is not taken for granted. Collective over the tensors' meshes:
    each gathers the indices of one dimension, once for all tensors that are cut alike.
    """
    seen = set()
    for name, tensor in named:
        for dim in {p.dim for p in tensor.placements if type(p).__name__ == "_StridedShard"}:
            placements = tuple(_along(p, dim) for p in tensor.placements)
            case = (tensor.device_mesh, placements, tensor.shape[dim])
            if case not in seen:
                seen.add(case)
                _check_run(name, tensor, dim, placements)


def _along(placement: Any, dim: int) -> Any:
    """Returns the placement of the indices of dimension ``dim``."""
    module = sys.modules["torch.distributed.tensor"]
    if placement.is_replicate() or placement.dim != dim:
        return module.Replicate()
    factor = getattr(placement, "split_factor", None)
    return module.Shard(0) if factor is None else type(placement)(0, split_factor=factor)


def _check_run(name: str, tensor: Any, dim: int, placements: Sequence[Any]) -> None:
    box, size = box_of(name, tensor), int(tensor.shape[dim])
    mine = torch.arange(box.offsets[dim], box.offsets[dim] + box.lengths[dim], device=local_of(tensor).device)
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    indices = dtensor.from_local(mine, tensor.device_mesh, placements, run_check=False, shape=(size,), stride=(1,))
    with _without_advice():
        gathered = indices.full_tensor()
    if not torch.equal(gathered.cpu(), torch.arange(size, device="cpu")):
        raise ArgumentError(
            f"{name}: torch {torch.__version__} gathers dimension {dim} of placements {tuple(tensor.placements)} in "
            f"another order than expected, {gathered.tolist()[:16]}...; please report this to superoffload"
        )


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silences what torch logs about the speed of such a gathering, which here has a few thousand indices."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
