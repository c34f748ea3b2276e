"""With ``accumulate_dtype="fp32"``, ``p.grad_dtype`` has autograd add up gradients of bf16 and fp16 parameters in fp32.

Autograd then keeps ``p.grad`` in fp32 and widens a gradient before it adds it. A framework that assigns gradients
without autograd keeps them in fp32 itself (superoffload/optimizer/frameworks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from superoffload.errors import ArgumentError, StateError
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer import frameworks
from superoffload.optimizer.packed_gradient import packed_in, stand_in_for

# ---- p.grad_dtype (torch 2.10 and newer) is set to fp32, and set back -----------------------------------------------


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


# ---- the fp32 sums of an optimizer ----------------------------------------------------------------------------------


Named = Iterable[tuple[str, Any]]


def check_fp32_sums(params: Named, model: nn.Module | None) -> None:
    """Checks that gradients of all these parameters can be added up in fp32; changes nothing."""
    named = list(params)
    for name, param in named:
        main = getattr(param, "main_grad", None)
        if main is not None and main.dtype != torch.float32:
            raise ArgumentError(
                f"accumulate_dtype='fp32': {name}: p.main_grad is {main.dtype}, so what is added to it is rounded; "
                "make it float32, or leave accumulate_dtype out"
            )
    ours = [(name, param) for name, param in named if _is_ours_to_set(param)]
    if not ours:
        return
    if not hasattr(Tensor, "grad_dtype"):
        raise ArgumentError(
            f"accumulate_dtype='fp32': {ours[0][0]} needs p.grad_dtype, which torch {torch.__version__} does not have; "
            "it needs torch 2.10 or newer, or p.main_grad in float32, to which a hook of yours adds"
        )
    known = {id(param) for param in model.parameters()} if model is not None else set()
    for name, param in ours:
        if is_dtensor(param) and id(param) not in known and not is_widened(param):
            raise ArgumentError(
                f"accumulate_dtype='fp32': {name} is a DTensor, and what reduces its gradients must keep them in fp32; "
                "pass model=, or call superoffload.integrations.fsdp2.keep_reduced_gradients(model) before this"
            )
    if model is not None:
        frameworks.check_fp32_sums(model, ours)


class Fp32Accumulation:
    """Sets ``p.grad_dtype`` for one optimizer, and sets it back."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self._dtypes = GradDtypes()
        self._kept: list[Callable[[], None]] = []  # each restores a framework's rounding of some gradients

    def check_params(self, params: Named, model: nn.Module | None) -> None:
        """Calls ``check_fp32_sums`` if gradients are to be added up in fp32."""
        if self.wanted:
            check_fp32_sums(params, model)

    def begin(self, params: Named, model: nn.Module | None) -> None:
        """Sets ``p.grad_dtype`` on parameters that ``check_fp32_sums`` has checked and that train, now or later."""
        if not self.wanted:
            return
        ours = [param for _, param in params if _is_ours_to_set(param)]
        if model is not None:
            self._kept += frameworks.keep_fp32_sums(model, ours)
        for param in ours:
            self._dtypes.widen(param)

    def check(self, name: str, param: Any, gradient: Tensor) -> None:
        """Raises if a gradient that is handed over is not in fp32, because the user has changed its dtype since."""
        if not self.wanted or gradient.dtype == torch.float32:
            return
        declared = getattr(param, "grad_dtype", None)
        why = f"p.grad_dtype was set to {declared} since the optimizer was made"
        if declared is torch.float32:
            why = "p.grad was replaced or converted (model.to) since backward"
        raise StateError(
            f"{name}: its gradient is {gradient.dtype}, so it was not added up in fp32 as accumulate_dtype='fp32' asks "
            f"for: {why}. Nothing has changed. Call zero_grad() and leave gradients and p.grad_dtype as they are; "
            "where they must change, make the optimizer after that, or without accumulate_dtype"
        )

    def end(self) -> None:
        """Restores everything, dtypes of gradients included."""
        while self._kept:
            self._kept.pop()()
        self._dtypes.put_back()


def _is_ours_to_set(param: Any) -> bool:
    """Returns whether we set ``p.grad_dtype``: not where gradients add up in fp32 without us."""
    if param.dtype is torch.float32 or getattr(param, "main_grad", None) is not None:
        return False
    return getattr(param, "grad_dtype", None) is not torch.float32 or is_widened(param)
