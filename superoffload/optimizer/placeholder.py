"""A placeholder stands in ``p.grad`` for a gradient that was packed and freed; it has no memory of its own.

When its elements are needed, the packed gradient is copied back, and all operations use that copy: additions of
autograd, reads, clips, unscaling. So loops that edit gradients by hand are right, only slower. Where gradients add up
in host memory (superoffload/optimizer/accumulation.py), the placeholder keeps autograd's addend for our hook.

[Note: who may write a placeholder] Autograd adds to what is in ``p.grad``, in C++, before our hook runs: one addend is
kept and not added (``takes``), since the hook adds it to the packed gradient. ``zero_`` is only noted. Every other
write, by whatever thread, goes to the copy that was brought back; ``step()`` finds it written and packs it anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from superoffload.errors import StateError
from superoffload.host.memory import room_on_device
from superoffload.host.tensors import is_dtensor


class GradientPlaceholder(Tensor):
    """Has shape, dtype, device and strides of a parameter's gradient; ``fetch`` fills in the gradient on demand.

    Every packed gradient gets a new placeholder, so that one that a user keeps never stands for a later gradient.
    """

    of: str  # the name of the parameter
    shard: int  # its index
    in_memory: Tensor | None  # the gradient, once it was brought back
    zeroed: bool  # it was set to zero since the gradient was packed
    addend: Tensor | None  # to be added to the packed gradient
    _fetch: Callable[[GradientPlaceholder], None]
    _offer: Callable[[GradientPlaceholder, Tensor], None]

    @staticmethod
    def __new__(
        cls,
        name: str,
        shard: int,
        param: Tensor,
        dtype: torch.dtype,
        *_: Any,
    ) -> GradientPlaceholder:
        made: GradientPlaceholder = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=dtype, device=param.device, requires_grad=False
        )
        return made

    def __init__(
        self,
        name: str,
        shard: int,
        param: Tensor,
        dtype: torch.dtype,
        fetch: Callable[[GradientPlaceholder], None],
        offer: Callable[[GradientPlaceholder, Tensor], None],
    ) -> None:
        """``offer`` calls ``keep_addend`` with its argument if its owner will add that to the packed gradient."""
        self.of, self.shard, self.in_memory, self.zeroed, self.addend = name, shard, None, False, None
        self._fetch, self._offer = fetch, offer

    def bring_back(self) -> Tensor:
        """Returns the gradient as an ordinary tensor, the same one at every call."""
        if self.in_memory is None and self.zeroed:
            with torch.inference_mode(False), room_on_device(f"{self.of}: zeros in the place of its gradient"):
                zeros = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device=self.device).zero_()
            self.in_memory = zeros if self.in_memory is None else self.in_memory  # another thread may have set it
        elif self.in_memory is None:
            self._fetch(self)
        if self.in_memory is None:
            raise gradient_is_gone(self.of, "it has made way for a later one, or its optimizer is closed")
        return self.in_memory

    def in_dtype(self, dtype: torch.dtype) -> GradientPlaceholder:
        """Returns another placeholder for the same, untouched gradient in ``dtype``."""
        other = GradientPlaceholder(self.of, self.shard, self, dtype, self._fetch, self._offer)
        if self.zeroed:
            other.set_to_zero()
        return other

    def fill(self, gradient: Tensor) -> None:
        """Uses ``gradient``, an ordinary tensor, as the gradient from now on."""
        self.in_memory = gradient

    def empty(self) -> None:
        """Drops a tensor that was filled in wrongly; the placeholder stands for the packed gradient again."""
        self.in_memory = None

    def keep_addend(self, addend: Tensor) -> None:
        """Keeps an addend of autograd until it is added to the packed gradient."""
        self.addend = addend

    def take_addend(self) -> Tensor | None:
        """Forgets the addend and returns it; the caller adds it or has added it."""
        addend, self.addend = self.addend, None
        return addend

    @property
    def is_untouched(self) -> bool:
        """Returns whether no operation has used the placeholder since the gradient was packed."""
        return self.in_memory is None and self.addend is None and not self.zeroed

    def set_to_zero(self) -> GradientPlaceholder | Tensor:
        """Sets the gradient to zero, without memory for the zeros until they are needed."""
        if self.in_memory is not None:
            return self.in_memory.zero_()
        self.zeroed, self.addend = True, None
        return self

    def takes(self, addend: Any) -> bool:
        """Returns whether the placeholder keeps ``addend``, so that the gradient need not be brought back."""
        plain = type(addend) is Tensor and (addend.shape, addend.dtype) == (self.shape, self.dtype)
        if not plain or self.zeroed or self.in_memory is not None or self.addend is not None:
            return False
        self._offer(self, addend)
        return self.addend is addend

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Serves calls from Python, among them those that need memory (``data_ptr``, ``numpy``, ``tolist``)."""
        first = args[0] if args else None
        if isinstance(first, GradientPlaceholder) and first.in_memory is None and _is_about_its_form(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _do(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Serves calls from C++: autograd's additions to ``p.grad``, collectives."""
        return _do(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.in_memory is not None:
            return repr(self.in_memory)
        return f"GradientPlaceholder({self.of!r}: packed and freed during backward)"


def stand_in_for(param: Tensor, packed: GradientPlaceholder) -> Tensor:
    """Returns ``packed`` in a form that ``p.grad`` accepts: for a DTensor, a DTensor whose local part it is."""
    if not is_dtensor(param):
        return packed
    spec = replace(param._spec, tensor_meta=param._spec.tensor_meta._replace(dtype=packed.dtype))
    whole: Tensor = sys.modules["torch.distributed.tensor"].DTensor(packed, spec, requires_grad=False)
    return whole


def packed_in(grad: Tensor | None) -> GradientPlaceholder | None:
    """Returns the placeholder that ``p.grad`` is or has as its local part; None for an ordinary tensor."""
    if is_dtensor(grad):
        grad = grad._local_tensor
    return grad if isinstance(grad, GradientPlaceholder) else None


def unpacked(param: Tensor) -> Tensor | None:
    """Brings ``p.grad`` back if it is a placeholder, and returns it."""
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


# These are often asked and need no elements. All other operations bring the gradient back.
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
_ADDED = torch.ops.aten.add_.Tensor  # autograd calls this; Python's operators are other functions


def _is_about_its_form(func: Any, args: Any) -> bool:
    return func in _FORM or (func is Tensor.requires_grad_ and args[1:] == (False,))


def _do(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls ``func`` with ordinary tensors in place of placeholders."""
    if func in _TO_ZERO:
        return args[0].set_to_zero()
    if func is _ADDED and not kwargs and isinstance(args[0], GradientPlaceholder) and args[0].takes(*args[1:]):
        return args[0]
    return func(*_brought_back(args), **_brought_back(kwargs or {}))


def _brought_back(value: Any) -> Any:
    if isinstance(value, GradientPlaceholder):
        return value.bring_back()
    elif isinstance(value, dict):
        return {key: _brought_back(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        return type(value)(_brought_back(item) for item in value)
    return value
