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
            before = param.grad_dtype
            _set(param, torch.float32)
            self._before[param] = before

    def put_back(self) -> None:
        """A gradient that is there is rounded to what ``p.grad`` may be then. One that cannot be, on a device that is
        full or broken, is gone: the others and their parameters are none the worse for it."""
        while self._before:
            param, dtype = self._before.popitem()
            try:
                _set(param, dtype)
            except RuntimeError:
                param.grad = None
                _set(param, dtype)


def _set(param: Any, dtype: torch.dtype | None) -> None:
    """torch sets it only where ``p.grad`` has that dtype already. Changes nothing where memory is refused."""
    grad = param.grad
    if grad is not None:
        grad = _in_dtype(param, grad, dtype or param.dtype)
    param.grad = None
    param.grad_dtype = dtype
    param.grad = grad


@torch.no_grad()
def _in_dtype(param: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    packed = packed_in(grad)
    if packed is None or packed.in_memory is not None or packed.addend is not None:
        with torch.inference_mode(False):
            return grad.to(dtype)
    like = PackedGradient(packed.of, packed.shard, packed, dtype, packed._fetch, packed._offer)
    like.zeroed = packed.zeroed
    return stand_in_for(param, like)
