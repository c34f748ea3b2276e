"""Checks of what users pass to ``superoffload.AdamW``; every message says what was expected and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from superoffload.bucket import ELEMENT_TYPES
from superoffload.errors import ArgumentError


def check_number(name: str, value: Any, *, low: float, high: float = math.inf, below: bool = False) -> float:
    """``value`` as a finite float within [low, high], or [low, high) with ``below``."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    good = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
    if not good or number < low or number > high or (below and number == high):
        upper = "" if high == math.inf else f" and {'below' if below else 'at most'} {high:g}"
        raise ArgumentError(f"{name}={value!r}: expected a finite number of at least {low:g}{upper}")
    return float(number)


def check_max_grad_norm(value: Any) -> float | None:
    """None (no clipping) or a finite number above 0."""
    if value is None:
        return None
    number = check_number("max_grad_norm", value, low=0.0)
    if number == 0.0:
        raise ArgumentError("max_grad_norm=0: every gradient would become 0; pass None to switch clipping off")
    return number


def check_group(group: Mapping[str, Any]) -> None:
    """The hyper-parameters of one param group."""
    check_number("lr", group["lr"], low=0.0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ArgumentError(f"betas={betas!r}: expected two numbers, such as (0.9, 0.999)")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta, low=0.0, high=1.0, below=True)
    check_number("eps", group["eps"], low=0.0)
    check_number("weight_decay", group["weight_decay"], low=0.0)


def check_parameter(name: str, param: Any) -> None:
    """What a parameter must be to have its state in host memory."""
    if not isinstance(param, Tensor):
        raise ArgumentError(f"{name}: {type(param).__name__}, expected a torch.Tensor (model.parameters())")
    if param.layout is not torch.strided:
        raise ArgumentError(f"{name}: layout {param.layout}, expected a dense tensor; leave sparse parameters out")
    if param.dtype not in ELEMENT_TYPES:
        raise ArgumentError(
            f"{name}: dtype {param.dtype}, expected float32, bfloat16 or float16; convert it or leave it out"
        )
    if param.device.type == "meta":
        raise ArgumentError(f"{name}: on the meta device; materialize the model before making the optimizer")
    if param.device.type != "cpu":
        raise ArgumentError(
            f"{name}: on {param.device}; this version serves parameters on the CPU only (the CUDA link comes with the "
            "pipeline). Move the model with model.cpu()"
        )
    if not param.is_contiguous():
        raise ArgumentError(
            f"{name}: shape {tuple(param.shape)} with strides {param.stride()} is not contiguous; "
            "make it so with torch.nn.Parameter(param.detach().contiguous())"
        )
    if not param.is_leaf:
        raise ArgumentError(f"{name}: not a leaf of autograd; pass the parameters themselves, not results of theirs")


def check_finite(name: str, param: Tensor) -> None:
    """Training from NaN or infinite weights cannot work, and a speculated step would hide where they came from."""
    if not bool(torch.isfinite(param.detach()).all()):
        bad = int((~torch.isfinite(param.detach())).sum())
        raise ArgumentError(f"{name}: {bad} of {param.numel()} initial values are NaN or infinite; initialize it first")


def refuse_unknown(delivery: str, placement: Any, rank_check: Any) -> None:
    """Options whose work is not in this version yet are refused rather than ignored."""
    if delivery != "eager":
        raise ArgumentError(f"delivery={delivery!r}: expected 'eager'; delivery on demand is not in this version")
    if placement is not None:
        raise ArgumentError(f"placement={placement!r}: expected None; state on the accelerator is not in this version")
    if rank_check not in ("off", "light", "full"):
        raise ArgumentError(f"rank_check={rank_check!r}: expected 'off', 'light' or 'full'")
