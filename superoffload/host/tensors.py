"""Describes tensors as this process sees them: local part, version, order of the elements in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor


def is_dtensor(tensor: Any) -> TypeGuard[Any]:
    """Recognizes a DTensor without loading its module: before that is loaded there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's part of ``tensor``: the tensor itself, or a DTensor's local part, outside of autograd."""
    if is_dtensor(tensor):
        with torch.no_grad():
            local: Tensor = tensor.to_local()  # tensor.detach() would start a version counter of its own
        return local
    return tensor.detach()


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Returns a value that changes with every write that version counters show, to a DTensor or to its local part."""
    return tensor._version, local_of(tensor)._version if is_dtensor(tensor) else 0


def dims_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Orders dimensions from the largest step in memory to the smallest; those of size one come first."""
    steps = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (tensor.shape[dim] > 1, -steps[dim])))


def is_dense(tensor: Tensor) -> bool:
    """Tells whether the elements fill a run of memory, each once, in any order of dimensions."""
    return tensor.is_contiguous() or tensor.permute(dims_in_memory(tensor)).is_contiguous()


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns the order of a dense tensor's dimensions in memory; None if that is their own order."""
    return None if tensor.is_contiguous() else dims_in_memory(tensor)


def in_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Flattens a tensor with its dimensions in this order: a view if they lie in memory so, else a copy."""
    return (tensor if order is None else tensor.permute(order)).reshape(-1)


def out_of_order(flat: Tensor, shape: Sequence[int], order: tuple[int, ...] | None) -> Tensor:
    """Views what ``in_order`` returned in the tensor's ``shape`` again."""
    if order is None:
        return flat.view(tuple(shape))
    return flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def values_in_memory(tensor: Tensor) -> Tensor:
    """Returns a tensor that is contiguous and whose memory has its values, a copy where its own has not: with torch's
    negative bit (``x.conj().imag``) memory has the opposite signs, and some of torch's zeros have no memory."""
    plain = tensor.contiguous().resolve_neg()
    return plain if plain.data_ptr() else plain.clone()


_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_inference(function: _Function) -> _Function:
    """Leaves a caller's ``torch.inference_mode()``, in which state would be made that nothing may change later."""
    result: _Function = torch.inference_mode(mode=False)(function)
    return result
