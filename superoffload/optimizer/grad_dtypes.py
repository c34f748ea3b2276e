"""``p.grad_dtype`` (torch 2.10 and newer) is set to fp32 here, and set back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from superoffload.optimizer.packed_gradient import packed_in, stand_in_for


@dataclass
class _Widened:
    before: torch.dtype | None
    was_own: bool  # ``before`` was the parameter's own dtype, torch's default
    holders: int = 0

    def hold(self) -> None:
        self.holders += 1

    def release(self) -> bool:
        """Removes a holder; returns whether it was the last one."""
        self.holders -= 1
        return self.holders <= 0


_WIDENED: Any = WeakTensorKeyDictionary()  # for each parameter its dtype before, shared by all holders


def is_widened(param: Tensor) -> bool:
    """Returns whether we have set ``p.grad_dtype`` to fp32."""
    return param in _WIDENED


class GradDtypes:
    """Holds widened parameters. The last holder that puts a parameter back restores the dtype before the first."""

    def __init__(self) -> None:
        self._held: dict[Tensor, None] = {}

    def widen(self, param: Any) -> None:
        """Widens the parameter's gradients, also one that exists already."""
        if param in self._held:
            return
        if not is_widened(param):
            before = param.grad_dtype
            if before is torch.float32:
                return
            _set(param, torch.float32)
            _WIDENED[param] = _Widened(before, before == param.dtype)
        _WIDENED[param].hold()
        self._held[param] = None

    def put_back(self) -> None:
        """Restores the dtypes and rounds existing gradients to them. A gradient that cannot be rounded, because its
        device is full or broken, is dropped; all others are restored."""
        while self._held:
            param, _ = self._held.popitem()
            widened = _WIDENED.get(param)
            if widened is None or not widened.release():  # None: parameter and optimizer are garbage, and end together
                continue
            del _WIDENED[param]
            dtype = param.dtype if widened.was_own else widened.before  # the model may have been converted since
            try:
                _set(param, dtype)
            except RuntimeError:
                param.grad = None
                _set(param, dtype)


def _set(param: Any, dtype: torch.dtype | None) -> None:
    """Converts ``p.grad`` first, since torch demands that. Changes nothing where memory is refused."""
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
    return stand_in_for(param, packed.in_dtype(dtype))
