"""``p.grad_dtype`` (torch 2.10 and newer), set to fp32 and set back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superoffload.packed_gradient import PackedGradient, packed_in, stand_in_for


class GradDtypes:
    """Remembers what ``p.grad_dtype`` was before it was widened."""

    def __init__(self) -> None:
        self._before: dict[Tensor, torch.dtype | None] = {}

    def widen(self, param: Any) -> None:
        """A gradient that is there already is widened with it."""
        if param.grad_dtype is not torch.float32:
            self._before[param] = param.grad_dtype
            _set(param, torch.float32)

    def put_back(self) -> None:
        """A gradient that is there is rounded to what ``p.grad`` may be then."""
        while self._before:
            _set(*self._before.popitem())


def _set(param: Any, dtype: torch.dtype | None) -> None:
    """torch sets it only where ``p.grad`` has it already."""
    grad = param.grad
    param.grad = None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = _in_dtype(param, grad, dtype or param.dtype)


@torch.no_grad()
def _in_dtype(param: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    packed = packed_in(grad)
    if packed is None or packed.in_memory is not None:
        with torch.inference_mode(False):
            return grad.to(dtype)
    like = PackedGradient(packed.of, packed.shard, packed, dtype, packed._fetch)
    like.zeroed = packed.zeroed
    return stand_in_for(param, like)
