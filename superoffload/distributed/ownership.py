"""Decides which elements of a parameter this rank holds, and which ranks hold the same ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from superoffload.engine.bucket import ALIGN
from superoffload.errors import ArgumentError
from superoffload.host.tensors import in_order, is_dtensor, local_of, memory_order, out_of_order, values_in_memory

REPLICATED = ("replicate", "shard", "local")


@dataclass(frozen=True)
class Chunk:
    """Names the elements that ``owner`` holds: ``length`` indices from ``start`` of dimension ``dim``."""

    owner: int
    dim: int
    start: int
    length: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class Holding:
    """Describes this rank's part of one parameter.

    ``replicas``: the ranks whose shard has the same elements. ``chunks``: all owners' parts of the whole parameter, as
    this rank sees it; one chunk where nothing is sharded. ``start``: index of the first element of the part in the flat
    parameter. ``flat_chunks``: chunks count in the flat parameter rather than in one of its dimensions. ``order``: the
    order of the dimensions in the parameter's and the shard's memory, where this rank holds the whole parameter; None:
    their own order.
    """

    kind: str
    replicas: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    own: Chunk
    start: int
    flat_chunks: bool = False
    order: tuple[int, ...] | None = None

    def part(self, tensor: Tensor) -> Tensor:
        """Returns this rank's elements of the parameter, or of a tensor laid out like it (its gradient), flat."""
        local = local_of(tensor)
        if self.flat_chunks and not is_dtensor(tensor):
            return self.own.of(local.reshape(-1))
        return in_order(local, self.order)

    def part_of_gradient(self, grad: Tensor) -> Tensor:
        """Returns this rank's elements of a gradient, flat, and contiguous in memory."""
        return values_in_memory(self.part(grad))

    def is_memory_of(self, param: Tensor) -> bool:
        """Tells whether this rank has all of a plain parameter, in the order of its dimensions."""
        return not (self.flat_chunks or is_dtensor(param)) and self.order is None

    def part_of_memory(self, flat: Tensor) -> Tensor:
        """Returns this rank's elements of a flat tensor whose elements are in the order of the parameter's memory."""
        return self.own.of(flat) if self.flat_chunks else flat

    def in_own_order(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Flattens a shard's elements in the order of a contiguous parameter of ``shape``, as files keep them."""
        return part if self.order is None else out_of_order(part, shape, self.order).reshape(-1)

    def part_of_whole(self, whole: Tensor) -> Tensor:
        """Returns this rank's elements of a plain tensor of the parameter's full shape, flat."""
        return self.chunk_of_whole(whole, self.own)

    def chunk_of_whole(self, whole: Tensor, chunk: Chunk) -> Tensor:
        plain = whole.detach()
        if self.order is not None:
            return in_order(plain, self.order)
        if plain.dim() == 0 or self.flat_chunks:
            plain = plain.reshape(-1)
        return chunk.of(plain).reshape(-1)


def whole_holding(param: Tensor, replicas: tuple[int, ...] = (0,)) -> Holding:
    """Lets every rank of ``replicas`` hold all of ``param``."""
    chunk = Chunk(replicas[0], 0, 0, param.shape[0] if param.dim() else 1)
    return Holding("plain", replicas, (chunk,), chunk, 0)


def sharded_holding(param: Tensor, ranks: tuple[int, ...], rank: int) -> Holding:
    """Spreads the state of a plain parameter over ``ranks``, in runs of the flat parameter."""
    return flat_holding("spread", ranks, rank, param.numel(), -(-param.numel() // (len(ranks) * ALIGN)) * ALIGN)


def flat_holding(kind: str, owners: Sequence[int], rank: int, numel: int, share: int) -> Holding:
    """Cuts a flat parameter into runs of ``share`` elements, one owner after the other."""
    chunks = even_chunks(owners, 0, numel, share)
    own = chunks[list(owners).index(rank)]
    return Holding(kind, (rank,), chunks, own, own.start, flat_chunks=True)


def dtensor_holding(name: str, param: Any) -> Holding:
    """Reads the layout of a DTensor as FSDP2 makes them: any number of Replicate, at most one Shard."""
    mesh, placements = param.device_mesh, param.placements
    sharded = [i for i, placement in enumerate(placements) if placement.is_shard()]
    known = all(p.is_replicate() or type(p).__name__ == "Shard" for p in placements)
    if not known or len(sharded) > 1:
        raise ArgumentError(
            f"{name}: placements {tuple(placements)}, expected Replicate and at most one Shard, as fully_shard makes "
            "them; tensor and pipeline parallel layouts are not served"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ArgumentError(f"{name}: this rank is not in the parameter's mesh {mesh}; pass the parameters it has")
    free = tuple(slice(None) if p.is_replicate() else c for p, c in zip(placements, coordinate, strict=True))
    replicas = tuple(sorted(int(rank) for rank in mesh.mesh[free].reshape(-1)))
    kind = f"dtensor {[str(p) for p in placements]} {tuple(mesh.shape)}"
    if not sharded:
        chunk = Chunk(replicas[0], 0, 0, param.shape[0] if param.dim() else 1)
        return Holding(kind, replicas, (chunk,), chunk, 0)
    (axis,) = sharded
    dim = placements[axis].dim
    line = mesh.mesh[tuple(slice(None) if i == axis else c for i, c in enumerate(coordinate))].tolist()
    size = int(param.shape[dim])
    chunks = even_chunks([int(rank) for rank in line], dim, size, -(-size // len(line)))  # as torch.chunk cuts
    own = chunks[coordinate[axis]]
    return Holding(kind, replicas, chunks, own, own.start * int(param.stride(dim)))


def even_chunks(owners: Sequence[int], dim: int, size: int, share: int) -> tuple[Chunk, ...]:
    """Gives ``share`` of ``size`` indices to each owner; the last ones get fewer or none."""
    starts = [min(size, i * share) for i in range(len(owners))]
    return tuple(Chunk(r, dim, s, min(share, size - s)) for r, s in zip(owners, starts, strict=True))


def holder(replicated: str, ranks: tuple[int, ...] | None, rank: int) -> Callable[[str, Tensor], Holding]:
    """Returns the function that decides where parameters are; ``ranks`` None: no other rank shares plain parameters."""

    def holding_of(name: str, param: Tensor) -> Holding:
        if is_dtensor(param):
            return dtensor_holding(name, param)
        order = memory_order(param)
        if ranks is None or replicated == "local":
            return replace(whole_holding(param, (rank,)), order=order)
        if replicated == "shard":
            if order is not None:
                raise ArgumentError(
                    f"{name}: shape {tuple(param.shape)} with strides {param.stride()} is not contiguous, and "
                    "replicated='shard' cuts parameters in the order of their dimensions; pass replicated='replicate', "
                    "or make it contiguous before making the optimizer"
                )
            return sharded_holding(param, ranks, rank)
        return replace(whole_holding(param, ranks), order=order)

    return holding_of


def like_parameter(param: Tensor, holding: Holding, state: Tensor) -> Tensor:
    """Shapes the state of this rank's elements like the parameter, sharing memory: a DTensor for a DTensor.

    The state stays flat where this rank has only a run of a plain parameter.
    """
    if not is_dtensor(param):
        return state if holding.flat_chunks else out_of_order(state, param.shape, holding.order)
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    local = state.view(local_of(param).shape)
    if param.device_mesh.device_type != state.device.type:  # from_local would move the state to the mesh's device
        meta = param._spec.tensor_meta._replace(dtype=state.dtype)
        there: Tensor = dtensor(local, replace(param._spec, tensor_meta=meta), requires_grad=False)
        return there
    whole: Tensor = dtensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return whole
