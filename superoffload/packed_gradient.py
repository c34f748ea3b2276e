"""What stands in ``p.grad`` for a gradient that was packed and freed: it has no memory until its elements are needed.

Then they are copied back from where they were packed, and everything is done with that copy: what autograd adds, what
reads, clips or unscales. So loops that work with gradients by hand are right, only slower than those that need not.
Where gradients add up in host memory (superoffload/optimizer/host_sums.py), what autograd adds waits here for our hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from superoffload.errors import StateError
from superoffload.host.tensors import is_dtensor
from superoffload.memory import room_on_device


class PackedGradient(Tensor):
    """Shape, dtype, device and strides of a parameter's gradient, which ``fetch`` fills into ``in_memory`` when asked.

    A new one stands for every gradient that is packed, so that one which is kept for longer is never taken for another.
    """

    of: str  # the name of the parameter
    shard: int  # its index
    in_memory: Tensor | None  # the gradient, once it was brought back
    zeroed: bool  # it was set to zero since it was packed
    addend: Tensor | None  # what is still to be added to what was packed
    _fetch: Callable[[PackedGradient], None]
    _offer: Callable[[PackedGradient, Tensor], None]

    @staticmethod
    def __new__(
        cls,
        name: str,
        shard: int,
        param: Tensor,
        dtype: torch.dtype,
        fetch: Callable[[PackedGradient], None],
        offer: Callable[[PackedGradient, Tensor], None],
    ) -> PackedGradient:
        """``offer`` calls ``keep_addend`` with what it is given where its owner adds it to what was packed."""
        made: PackedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=dtype, device=param.device, requires_grad=False
        )
        made.of, made.shard, made.in_memory, made.zeroed, made.addend = name, shard, None, False, None
        made._fetch, made._offer = fetch, offer
        return made

    def __init__(self, *_: Any) -> None:
        """All is done in ``__new__``, as for every tensor."""

    def bring_back(self) -> Tensor:
        """The gradient as an ordinary tensor; the same one at every call."""
        if self.in_memory is None and self.zeroed:
            with torch.inference_mode(False), room_on_device(f"{self.of}: zeros in the place of its gradient"):
                zeros = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=self.device).zero_()
            self.in_memory = zeros if self.in_memory is None else self.in_memory  # another thread's
        elif self.in_memory is None:
            self._fetch(self)
        if self.in_memory is None:
            raise gradient_is_gone(self.of, "what was packed has made way for a later one, or its optimizer is closed")
        return self.in_memory

    def in_dtype(self, dtype: torch.dtype) -> PackedGradient:
        """Another one that stands for the same, untouched, gradient in ``dtype``."""
        other = PackedGradient(self.of, self.shard, self, dtype, self._fetch, self._offer)
        other.zeroed = self.zeroed
        return other

    def fill(self, gradient: Tensor) -> None:
        """``gradient``, in memory, is what this stood for until now."""
        self.in_memory = gradient

    def empty(self) -> None:
        """What it was filled with is not right; it stands for what was packed again."""
        self.in_memory = None

    def keep_addend(self, addend: Tensor) -> None:
        """Autograd has given ``addend``, which waits here until it is added to what was packed."""
        self.addend = addend

    def take_addend(self) -> Tensor | None:
        """What was still to be added, which its taker adds, or has added."""
        addend, self.addend = self.addend, None
        return addend

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was done with it since the gradient was packed."""
        return self.in_memory is None and self.addend is None and not self.zeroed

    def set_to_zero(self) -> PackedGradient | Tensor:
        """Needs no memory as long as it is all that is done."""
        if self.in_memory is not None:
            return self.in_memory.zero_()
        self.zeroed, self.addend = True, None
        return self

    def takes(self, addend: Any) -> bool:
        """Whether what autograd adds waits in ``addend``, so that nothing need be brought back."""
        plain = type(addend) is Tensor and (addend.shape, addend.dtype) == (self.shape, self.dtype)
        if not plain or self.zeroed or self.in_memory is not None or self.addend is not None:
            return False
        self._offer(self, addend)
        return self.addend is addend

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What Python calls, functions that look for memory (``data_ptr``, ``numpy``, ``tolist``) among it."""
        first = args[0] if args else None
        if isinstance(first, PackedGradient) and first.in_memory is None and _is_about_its_form(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _do(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What C++ calls: autograd where it adds to ``p.grad``, collectives."""
        return _do(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.in_memory is not None:
            return repr(self.in_memory)
        return f"PackedGradient({self.of!r}: packed and freed during backward)"


def stand_in_for(param: Tensor, packed: PackedGradient) -> Tensor:
    """What ``p.grad`` can be: where the parameter is a DTensor, one whose local part is ``packed``."""
    if not is_dtensor(param):
        return packed
    spec = replace(param._spec, tensor_meta=param._spec.tensor_meta._replace(dtype=packed.dtype))
    whole: Tensor = sys.modules["torch.distributed.tensor"].DTensor(packed, spec, requires_grad=False)
    return whole


def packed_in(grad: Tensor | None) -> PackedGradient | None:
    """The placeholder that ``p.grad`` is, or has as its local part; None where that is an ordinary tensor."""
    if is_dtensor(grad):
        grad = grad._local_tensor
    return grad if isinstance(grad, PackedGradient) else None


def unpacked(param: Tensor) -> Tensor | None:
    """``p.grad``, which is an ordinary tensor from now on."""
    grad = param.grad
    packed = packed_in(grad)
    if packed is None:
        return grad
    if is_dtensor(grad):
        grad._local_tensor = packed.bring_back()
    else:
        param.grad = packed.bring_back()
    return param.grad


def gradient_is_gone(name: str, why: str) -> StateError:
    return StateError(
        f"{name}: its gradient was packed and freed during backward, and {why}. Between steps call zero_grad(). Code "
        "that keeps gradients beyond that needs copies of them (p.grad.clone()) or AdamW(..., keep_grads=True)"
    )


# Asked of tensors all the time, and answered without their elements. Whatever is not here brings them back.
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "_version"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested"),
    *("grad", "grad_fn", "is_leaf", "requires_grad"),
)
_METHODS = (
    *("size", "dim", "stride", "numel", "nelement", "element_size", "storage_offset", "get_device", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex"),
)
_FORM = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(Tensor, name) for name in _METHODS),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    ]
)
_TO_ZERO = frozenset([Tensor.zero_, torch.zero_, torch.ops.aten.zero_.default])
_ADDED = torch.ops.aten.add_.Tensor  # what autograd does; Python's operators are other functions


def _is_about_its_form(func: Any, args: Any) -> bool:
    return func in _FORM or (func is Tensor.requires_grad_ and args[1:] == (False,))


def _do(func: Any, args: Any, kwargs: Any) -> Any:
    """With ordinary tensors in place of placeholders."""
    if func in _TO_ZERO:
        return args[0].set_to_zero()
    if func is _ADDED and not kwargs and isinstance(args[0], PackedGradient) and args[0].takes(*args[1:]):
        return args[0]
    return func(*_brought_back(args), **_brought_back(kwargs or {}))


def _brought_back(value: Any) -> Any:
    if isinstance(value, PackedGradient):
        return value.bring_back()
    elif isinstance(value, dict):
        return {key: _brought_back(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        return type(value)(_brought_back(item) for item in value)
    return value
