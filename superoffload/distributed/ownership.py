"""Decides which elements of a parameter this rank holds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from superoffload.distributed.boxes import Box
from superoffload.distributed.placements import box_of
from superoffload.engine.bucket import ALIGN
from superoffload.errors import ArgumentError
from superoffload.host.tensors import in_order, is_dtensor, local_of, memory_order, out_of_order, values_in_memory

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
