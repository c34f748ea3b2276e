"""Gradients of several backward passes add up: which of these is the last, and in which dtype and memory the sum is.

A backward inside ``with optimizer.accumulate():``, or in the window of a framework's loop, is not the last one. With
``accumulate_dtype="fp32"``, ``p.grad_dtype`` has autograd keep ``p.grad`` of bf16 and fp16 parameters in fp32 and widen
a gradient before it adds it; a framework that assigns gradients without autograd keeps them in fp32 itself
(superoffload/optimizer/frameworks.py). If the device is too full for these sums, they are made in host memory, by
``Packer.add`` (superoffload/engine/inbox.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from superoffload.engine.bucket import Shard
from superoffload.engine.engine import Engine
from superoffload.errors import ArgumentError, StateError, warn
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer import frameworks
from superoffload.optimizer.advice import Advice
from superoffload.optimizer.frameworks import windows
from superoffload.optimizer.gradient_source import main_grad_of
from superoffload.optimizer.placeholder import packed_in, stand_in_for

F = TypeVar("F", bound=Callable[..., Any])
_BYTES = 4  # of an element in fp32


class Accumulating(ContextDecorator):
    """Adds itself to ``contexts`` while it is entered: then no backward is the boundary. Contexts nest.

    One that is never entered does nothing, and warns when it is freed.
    """

    _entered = True  # no warning if an interrupt comes before the constructor

    def __init__(self, contexts: list[Accumulating]) -> None:
        self._contexts = contexts
        self._entered = False

    def __call__(self, function: F) -> F:
        self._entered = True
        return super().__call__(function)

    def __enter__(self) -> None:
        self._entered = True
        self._contexts.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.pop()

    def __del__(self) -> None:
        if not self._entered:
            warn(
                "accumulate() was called without `with`, which does nothing; write "
                "`with optimizer.accumulate():` around every backward() of a step but the last"
            )


class Accumulation:
    """Knows whether gradients accumulate now, and has ``fp32``, what holds them in fp32 if that was asked for."""

    def __init__(self, *, fp32: bool) -> None:
        self.contexts: list[Accumulating] = []  # open ones, of all threads
        self.fp32 = Fp32Accumulation(wanted=fp32)
        self._windows = windows()

    def context(self) -> Accumulating:
        return Accumulating(self.contexts)

    @property
    def is_asked_for(self) -> bool:
        """Returns whether an ``accumulate()`` context is open."""
        return bool(self.contexts)

    def is_of_a_window(self) -> bool:
        """Returns whether a framework's loop says that more gradients will be added."""
        return any(window.more_to_come() for window in self._windows)

    def step_begins(self, advice: Advice) -> None:
        for window in self._windows:
            window.step_begins(advice)


class HostAccumulation:
    """Decides once per optimizer, at the first gradient that is part of a sum. The device has seen a forward by then,
    so its peak of memory is known."""

    def __init__(self, engine: Engine, *, wanted: bool) -> None:
        self._engine = engine
        self._chosen = None if wanted and engine.link.frees_gradients else False

    @property
    def is_disabled(self) -> bool:
        """Returns whether no gradient is added up in host memory."""
        return self._chosen is False

    def serve(self, param: Tensor, shard: Shard) -> bool:
        """Returns whether this gradient is packed before the last pass, and further passes add to the packed one."""
        if self._chosen is False or param.grad is None or main_grad_of(param) is not None:
            return False
        if is_dtensor(param) or shard.resident:  # a resident one's packed gradient is on the device
            return False
        if self._chosen is None:
            numel = sum(shard.numel for shard in self._engine.shards if not shard.resident)
            self._chosen = not self._engine.link.has_room(_BYTES * numel)
        return self._chosen


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
