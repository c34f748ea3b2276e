"""Decides which elements of a parameter this rank holds, and which ranks own the same part.

A box is what a rank owns of a tensor: a run of indices in each dimension.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superoffload.engine.bucket import ALIGN
from superoffload.errors import ArgumentError
from superoffload.host.tensors import in_order, is_dtensor, local_of, memory_order, out_of_order, values_in_memory


@dataclass(frozen=True)
class Box:
    """Selects ``lengths[d]`` indices from ``offsets[d]`` on in each dimension d."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Selects all of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the box's elements of ``tensor``, as a view."""
        for dim, (offset, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, length)
        return tensor

    def first_in(self, shape: Sequence[int]) -> int:
        """Returns the place of the box's first element in a contiguous, flat tensor of ``shape``."""
        place = 0
        for offset, size in zip(self.offsets, shape, strict=True):
            place = place * size + offset
        return place

    def axes_in(self, shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
        """Returns how the box's elements, in the order of its dimensions or in ``order``, lie in such a flat tensor.

        Each axis is (length, stride), the innermost first. Returns () where the elements follow one another.
        """
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        axes: list[tuple[int, int]] = []
        for dim in reversed(range(len(shape)) if order is None else order):
            length, stride = self.lengths[dim], strides[dim]
            if axes and stride == axes[-1][0] * axes[-1][1]:
                axes[-1] = (axes[-1][0] * length, axes[-1][1])
            elif length > 1:
                axes.append((length, stride))
        return () if self.numel == 0 or axes in ([], [(self.numel, 1)]) else tuple(axes)

    def within(self, outer: Box) -> Box | None:
        """Returns the box as a part of ``outer``'s elements; None if it is not inside of ``outer``."""
        offsets = tuple(mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True))
        ends = [offset + length for offset, length in zip(offsets, self.lengths, strict=True)]
        inside = all(o >= 0 for o in offsets) and all(e <= n for e, n in zip(ends, outer.lengths, strict=True))
        return Box(offsets, self.lengths) if inside else None


class Misfit(NamedTuple):
    """Says where ``boxes`` leave a gap or overlap."""

    what: str
    boxes: tuple[Box, ...]


def misfit(shape: Sequence[int], boxes: Iterable[Box]) -> Misfit | None:
    """Finds where different boxes do not have each element of ``shape`` once; None if they do.

    Along each dimension the boxes that are equal in the dimensions before must follow one another, as those that a mesh
    of ranks cuts do. Empty boxes have no element and do not count.
    """
    return _misfit(shape, [box for box in boxes if box.numel], 0) if math.prod(shape) else None


def _misfit(shape: Sequence[int], boxes: Sequence[Box], dim: int) -> Misfit | None:
    if dim == len(shape):
        return None if len(boxes) == 1 else Misfit("the same elements are in different parts", tuple(boxes))
    runs: defaultdict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        runs[box.offsets[dim], box.lengths[dim]].append(box)
    end, last = 0, tuple[Box, ...]()
    for (offset, length), members in sorted(runs.items()):
        if offset != end:
            what = f"indices {end} to {offset - 1} of dimension {dim} are in no part"
            if offset < end:
                what = f"index {offset} of dimension {dim} is in several parts"
            return Misfit(what, (*last, members[0]))
        found = _misfit(shape, members, dim + 1)
        if found is not None:
            return found
        end, last = offset + length, (members[0],)
    if end != shape[dim]:
        return Misfit(f"indices {end} to {shape[dim] - 1} of dimension {dim} are in no part", last)
    return None


# ---- boxes from the placements of a DTensor -------------------------------------------------------------------------

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


# ---- who owns the same part, from the boxes of all ranks ------------------------------------------------------------

Ranks = tuple[int, ...]
Pair = tuple[tuple[int, ...], tuple[int, ...]]  # the offsets and lengths of a box, as ranks tell them


@dataclass(frozen=True, eq=False)
class RankGroups:
    """Groups the ranks that have the same; each rank is in one group, ascending, and groups go by their first rank.

    An ``OwnersTable`` makes one object for equal groups, so that comparing two costs nothing.
    """

    groups: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_of", {rank: group for group in self.groups for rank in group})

    def of(self, rank: int) -> Ranks:
        """Returns the group of ``rank``."""
        groups: Mapping[int, Ranks] = vars(self)["_of"]
        return groups[rank]


@dataclass(frozen=True)
class Owners:
    """Knows for one parameter the boxes of all ranks. ``replicas``: the ranks that own the same elements, whose first
    one counts where elements must be counted once. A rank with an empty part is a group of its own."""

    boxes: tuple[Box, ...]  # by group
    replicas: RankGroups

    def parts(self) -> Iterator[tuple[int, Box]]:
        """Yields each box that is not empty with the first rank that owns it."""
        for box, group in zip(self.boxes, self.replicas.groups, strict=True):
            if box.numel:
                yield group[0], box

    def writer_of(self, rank: int) -> int | None:
        """Returns the rank that writes the part of ``rank`` to files: the first of those that own it. None if it is
        empty, unless the whole parameter is."""
        group = self.replicas.of(rank)
        if self.boxes[self.replicas.groups.index(group)].numel:
            return group[0]
        return None if any(box.numel for box in self.boxes) else self.replicas.groups[0][0]


class OwnersTable:
    """Makes the ``Owners`` of many parameters. Those that are cut alike share them: a model has a few shapes, and with
    a thousand ranks each costs milliseconds."""

    def __init__(self) -> None:
        self._partitions: dict[tuple[Ranks, ...], RankGroups] = {}
        self._known: dict[tuple[tuple[int, ...], Ranks, tuple[Pair, ...]], Owners] = {}

    def partition(self, groups: Sequence[Sequence[int]]) -> RankGroups:
        key = tuple(tuple(group) for group in groups)
        return self._partitions.setdefault(key, RankGroups(key))

    def apart(self, ranks: Ranks, told: Sequence[Pair]) -> Owners:
        """Returns the owners of parameters that are each rank's own."""
        return Owners(tuple(Box(*pair) for pair in told), self.partition([[rank] for rank in ranks]))

    def owners(self, name: str, shape: Sequence[int], ranks: Ranks, told: Sequence[Pair]) -> Owners:
        """Returns the owners of a parameter that ``ranks`` have, ascending; ``told``: the box of each.

        Raises ArgumentError if boxes overlap, or do not cover the parameter.
        """
        key = tuple(shape), ranks, tuple(told)
        if key not in self._known:
            self._known[key] = self._owners(name, shape, ranks, told)
        return self._known[key]

    def _owners(self, name: str, shape: Sequence[int], ranks: Ranks, told: Sequence[Pair]) -> Owners:
        groups: dict[tuple[Pair, int], list[int]] = {}
        for rank, pair in zip(ranks, told, strict=True):
            groups.setdefault((pair, -1 if all(pair[1]) else rank), []).append(rank)
        boxes = {Box(*pair): members for (pair, _), members in groups.items()}
        found = misfit(shape, boxes)
        if found is not None:
            parts = "; ".join(
                f"rank {', '.join(map(str, boxes[box]))}: {_in_words(box)}" for box in dict.fromkeys(found.boxes)
            )
            raise ArgumentError(
                f"{name}: {found.what} of its shape {tuple(shape)} ({parts}); expected that the ranks own the same "
                "part, or parts that do not overlap and cover the parameter. Is a mesh, or process_group=, too small?"
            )
        return Owners(tuple(Box(*pair) for pair, _ in groups), self.partition(list(groups.values())))


def _in_words(box: Box) -> str:
    return " x ".join(f"{o} to {o + n - 1}" for o, n in zip(box.offsets, box.lengths, strict=True)) or "all"


# ---- what this rank holds -------------------------------------------------------------------------------------------

REPLICATED = ("replicate", "shard", "local")


@dataclass(frozen=True)
class Holding:
    """Describes this rank's part of one parameter.

    ``kind``: how it is laid out over the ranks, the same on all of them. ``box``: this rank's part of a tensor of
    ``shape``: the parameter's, or if ``is_flat`` the flat parameter's. ``runs``: of a flat parameter the parts of all
    owners. ``order``: the order of the dimensions in the parameter's and the shard's memory, where this rank holds the
    whole parameter; None: their own order.
    """

    kind: str
    shape: tuple[int, ...]
    box: Box
    is_flat: bool = False
    runs: Mapping[int, Box] = field(default_factory=dict)
    order: tuple[int, ...] | None = None

    @property
    def start(self) -> int:
        """Returns the index of the part's first element in the flat parameter."""
        return self.box.first_in(self.shape)

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """Returns how the part's elements lie in the flat parameter (``Box.axes_in``)."""
        return self.box.axes_in(self.shape, self.order)

    def part(self, tensor: Tensor) -> Tensor:
        """Returns this rank's elements of the parameter, or of a tensor laid out like it (its gradient), flat."""
        local = local_of(tensor)
        if self.is_flat and not is_dtensor(tensor):
            return self.box.of(local.reshape(-1))
        return in_order(local, self.order)

    def part_of_gradient(self, grad: Tensor) -> Tensor:
        """Returns this rank's elements of a gradient, flat, and contiguous in memory."""
        return values_in_memory(self.part(grad))

    def is_memory_of(self, param: Tensor) -> bool:
        """Tells whether this rank has all of a plain parameter, in the order of its dimensions."""
        return not (self.is_flat or is_dtensor(param)) and self.order is None

    def part_of_memory(self, flat: Tensor) -> Tensor:
        """Returns this rank's elements of a flat tensor whose elements are in the order of the parameter's memory."""
        return self.box.of(flat) if self.is_flat else flat

    def in_own_order(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """Flattens a shard's elements in the order of a contiguous parameter of ``shape``, as files keep them."""
        return part if self.order is None else out_of_order(part, shape, self.order).reshape(-1)

    def part_of_whole(self, whole: Tensor) -> Tensor:
        """Returns this rank's elements of a plain tensor of the parameter's full shape, flat."""
        return self.box_of_whole(whole, self.box)

    def box_of_whole(self, whole: Tensor, box: Box) -> Tensor:
        """Returns the elements of any rank's box of a plain tensor of the parameter's full shape, flat."""
        plain = whole.detach()
        if self.order is not None:
            return in_order(plain, self.order)
        return box.of(plain.reshape(-1) if self.is_flat else plain).reshape(-1)


def whole_holding(param: Tensor, kind: str = "plain") -> Holding:
    """Lets this rank hold all of ``param``."""
    return Holding(kind, tuple(param.shape), Box.whole(param.shape))


def sharded_holding(param: Tensor, ranks: tuple[int, ...], rank: int) -> Holding:
    """Spreads the state of a plain parameter over ``ranks``, in runs of the flat parameter."""
    return flat_holding("spread", ranks, rank, param.numel(), -(-param.numel() // (len(ranks) * ALIGN)) * ALIGN)


def flat_holding(kind: str, owners: Sequence[int], rank: int, numel: int, share: int) -> Holding:
    """Cuts a flat parameter into runs of ``share`` elements, one owner after the other; the last ones get fewer."""
    starts = [min(numel, i * share) for i in range(len(owners))]
    runs = {owner: Box((at,), (min(share, numel - at),)) for owner, at in zip(owners, starts, strict=True)}
    return Holding(kind, (numel,), runs[rank], is_flat=True, runs=runs)


def dtensor_holding(name: str, param: Any) -> Holding:
    """Lets this rank hold its local part of a DTensor."""
    kind = dtensor_kind(param.placements, param.device_mesh.shape)
    return Holding(kind, tuple(param.shape), box_of(name, param))


def dtensor_kind(placements: Sequence[Any], sizes: Sequence[int]) -> str:
    """Names how a DTensor lies on a mesh of ``sizes``."""
    return f"dtensor {[str(placement) for placement in placements]} {tuple(sizes)}"


def holder(replicated: str, ranks: tuple[int, ...] | None, rank: int) -> Callable[[str, Tensor], Holding]:
    """Returns the function that decides where parameters are; ``ranks`` None: no other rank shares plain parameters."""

    def holding_of(name: str, param: Tensor) -> Holding:
        if is_dtensor(param):
            return dtensor_holding(name, param)
        order = memory_order(param)
        if ranks is None or replicated == "local":
            return replace(whole_holding(param, "local"), order=order)
        if replicated == "shard":
            if order is not None:
                raise ArgumentError(
                    f"{name}: shape {tuple(param.shape)} with strides {param.stride()} is not contiguous, and "
                    "replicated='shard' cuts parameters in the order of their dimensions; pass replicated='replicate', "
                    "or make it contiguous before making the optimizer"
                )
            return sharded_holding(param, ranks, rank)
        return replace(whole_holding(param), order=order)

    return holding_of


def like_parameter(param: Tensor, holding: Holding, state: Tensor) -> Tensor:
    """Shapes the state of this rank's elements like the parameter, sharing memory: a DTensor for a DTensor.

    The state stays flat where this rank has only a run of a plain parameter.
    """
    if not is_dtensor(param):
        return state if holding.is_flat else out_of_order(state, holding.shape, holding.order)
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
