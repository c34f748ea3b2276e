"""A parameter is stepped with ``p.main_grad`` if it has one, else with ``p.grad``.

``main_grad`` is Megatron's convention, which Transformer Engine follows: a hook, or a fused kernel during backward,
adds the gradients of a parameter to it, in fp32. ``p.grad`` is then ``None`` or a placeholder without meaning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from superoffload.errors import ArgumentError, StateError
from superoffload.host.tensors import is_dtensor


def main_grad_of(param: Tensor) -> Tensor | None:
    """Returns ``p.main_grad`` if the parameter has one and trains; a frozen parameter may still have an old one."""
    found: Tensor | None = getattr(param, "main_grad", None)
    return found if param.requires_grad else None


def gradient_of(param: Tensor) -> Tensor | None:
    """Returns the gradient that the parameter is stepped with: ``p.main_grad`` if it has one, else ``p.grad``."""
    main = main_grad_of(param)
    return param.grad if main is None else main


def is_added(param: Tensor) -> bool:
    """Returns whether ``p.main_grad`` includes all of ``p.grad``: that is None, or a fused kernel has marked it as
    added. It is still to be added where ``zero_out_wgrad`` says so, as for shared weights."""
    if param.grad is None:
        return True
    return bool(getattr(param, "grad_added_to_main_grad", False)) and not getattr(param, "zero_out_wgrad", False)


def check_one_gradient(name: str, param: Tensor) -> None:
    """Refuses two gradients of one parameter, since nothing says whether one includes the other."""
    if main_grad_of(param) is not None and not is_added(param):
        raise StateError(
            f"{name}: it has both p.grad and p.main_grad, and nothing says whether the one was added to the other. "
            "Code that adds p.grad to p.main_grad sets p.grad = None afterwards; where p.grad is a stand-in, as fused "
            "kernels return it, p.grad_added_to_main_grad = True says so. Without such kernels leave main_grad out: "
            "p.grad_dtype = torch.float32 has autograd itself keep gradients in fp32"
        )


def clear_main_grad(param: Tensor) -> None:
    """Sets ``p.main_grad`` to zero, in place, since kernels keep its address; marks ``p.grad`` as not added."""
    main: Tensor | None = getattr(param, "main_grad", None)
    if main is not None:
        main.zero_()
        if hasattr(param, "grad_added_to_main_grad"):
            param.grad_added_to_main_grad = False


def dtype_to_come(name: str, param: Tensor) -> torch.dtype:
    """Returns the dtype that the gradients of ``param`` will have, as far as its public attributes tell."""
    main = main_grad_of(param)
    if main is not None:
        return _checked(name, param, main.dtype, "p.main_grad")
    declared: torch.dtype | None = getattr(param, "grad_dtype", param.dtype)  # torch 2.10 and newer have it
    if "grad_dtype" in vars(param) and not hasattr(torch.Tensor, "grad_dtype"):
        raise ArgumentError(
            f"{name}: p.grad_dtype is set, which this torch ({torch.__version__}) does not know, so gradients would be "
            f"in {param.dtype} all the same; it needs torch 2.10, or leave grad_dtype out"
        )
    if declared is None:  # any dtype: fp32 holds all of them
        return torch.float32
    return _checked(name, param, declared, "p.grad_dtype")


def _checked(name: str, param: Tensor, dtype: torch.dtype, what: str) -> torch.dtype:
    if dtype not in (param.dtype, torch.float32):
        or_fp32 = ", or float32" if param.dtype != torch.float32 else ""
        raise ArgumentError(f"{name}: {what} is {dtype}, expected the parameter's dtype, {param.dtype}{or_fp32}")
    return dtype


def check_no_main_grad(param: Tensor) -> None:
    """Refuses ``p.main_grad``, for an optimizer that reads only ``p.grad``."""
    if main_grad_of(param) is not None:
        raise StateError(
            "parameter: it has p.main_grad, and CPUAdamW reads p.grad only; use superoffload.AdamW, which steps with "
            "main_grad, or delete p.main_grad"
        )


def accept_main_grad(param: Tensor) -> bool:
    """Returns, in a hook of ``param``, whether its gradient is final: ``p.main_grad`` once a fused kernel or an earlier
    hook has added all to it; ``p.grad`` unless another hook has removed it. A stand-in beside ``p.main_grad``, to which
    the next backward would add, is removed."""
    if main_grad_of(param) is None:
        return param.grad is not None
    final = is_added(param)
    if final:
        param.grad = None
    return final


@torch.no_grad()
def lay_out_like(param: Tensor) -> None:
    """Puts into ``p.grad`` the same gradient in the layout of the parameter, a DTensor, if it has another one.

    Under tensor parallelism without ``fully_shard`` autograd leaves what an operation gave: each rank's summand of the
    gradient (Partial) for a norm under sequence parallelism, the whole gradient for a sharded embedding. Collective
    over the parameter's mesh if so: all its ranks have the same operations, and so the same layouts.
    """
    grad = param.grad
    if is_dtensor(grad) and is_dtensor(param) and grad.placements != param.placements:
        param.grad = grad.redistribute(placements=param.placements)
