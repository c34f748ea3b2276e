"""``p.grad_dtype`` (torch 2.10 and newer), set to fp32 and set back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from superoffload.packed_gradient import packed_in, stand_in_for


@dataclass
class _Widened:
    before: torch.dtype | None
    was_own: bool  # the parameter's own dtype, as torch has it by default
    holders: int = 0

    def hold(self) -> None:
        self.holders += 1

    def let_go(self) -> bool:
        """Whether that was the last holder."""
        self.holders -= 1
        return self.holders <= 0


_WIDENED: Any = WeakTensorKeyDictionary()  # of each parameter what it was, for all that have widened it


def is_widened(param: Tensor) -> bool:
    """Whether ``p.grad_dtype`` is in fp32 because of us."""
    return param in _WIDENED


class GradDtypes:
    """One holder of widened parameters. The last one that puts a parameter back sets what it was before the first."""

    def __init__(self) -> None:
        self._held: dict[Tensor, None] = {}

    def widen(self, param: Any) -> None:
        """A gradient that is there already is widened with it."""
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
        """A gradient that is there is rounded to what ``p.grad`` may be then. One that cannot be, on a device that is
        full or broken, is gone: the others and their parameters are none the worse for it."""
        while self._held:
            param, _ = self._held.popitem()
            widened = _WIDENED[param]
            if not widened.let_go():
                continue
            del _WIDENED[param]
            dtype = param.dtype if widened.was_own else widened.before  # which was converted since, perhaps
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
    return stand_in_for(param, packed.in_dtype(dtype))
