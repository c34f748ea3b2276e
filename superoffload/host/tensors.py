"""What this process has of a tensor: its local part, its version, and the order of its elements in memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_dtensor(tensor: Any) -> TypeGuard[Any]:
    """Without loading what makes DTensors: where that is not loaded there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of ``tensor``: the tensor itself, or a DTensor's local part, outside of autograd."""
    if is_dtensor(tensor):
        with torch.no_grad():
            local: Tensor = tensor.to_local()  # not of detach(), which starts a version counter of its own
        return local
    return tensor.detach()


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Changes with every write that autograd's version counters can show, to a DTensor or to its local part."""
    return tensor._version, local_of(tensor)._version if is_dtensor(tensor) else 0


def dims_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from that of the largest steps in memory to that of the smallest; those of one index come first."""
    steps = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] > 1, -steps[dim])))


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a run of memory, each once, in whatever order of dimensions."""
    return tensor.is_contiguous() or tensor.permute(dims_in_memory(tensor)).is_contiguous()


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Of a dense tensor, the dimensions as they follow each other in memory; None where that is their own order."""
    return None if tensor.is_contiguous() else dims_in_memory(tensor)


def in_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Flat, with the dimensions in this order: a view where they have it in memory, else a copy."""
    return (tensor if order is None else tensor.permute(order)).reshape(-1)


def out_of_order(flat: Tensor, shape: Sequence[int], order: tuple[int, ...] | None) -> Tensor:
    """What ``in_order`` has made of a tensor of ``shape``, in that shape: a view."""
    if order is None:
        return flat.view(tuple(shape))
    return flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])
