"""The error of one step against the same step in double precision, ours and others', in units in the last place.

The unit is that of the largest term of a sum: where terms cancel, the last place of what remains says nothing about the
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from superoffload import kernels

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

PARTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepInputs:
    """State before the step, and a gradient that bf16 can hold; `hyper.step` is the number of the step."""

    master: Float32
    exp_avg: Float32
    exp_avg_sq: Float32
    gradient: Float32
    hyper: kernels.Hyper

    def copies(self) -> tuple[Float32, Float32, Float32]:
        return self.master.copy(), self.exp_avg.copy(), self.exp_avg_sq.copy()


@dataclass(frozen=True)
class ErrorFigures:
    """Of one array, in units in the last place of its largest term."""

    largest: float
    mean: float


def training_like_inputs(numel: int, seed: int, step: int = 100, lr: float = 1e-3) -> StepInputs:
    """Weights, moments and gradients with the spread of magnitudes that training has."""
    random = np.random.default_rng(seed)
    scale = np.exp(random.normal(-7.0, 2.0, numel))
    gradient = (scale * random.standard_normal(numel)).astype(np.float32)
    rounded = (gradient.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return StepInputs(
        master=(0.02 * random.standard_normal(numel)).astype(np.float32),
        exp_avg=(0.3 * scale * random.standard_normal(numel)).astype(np.float32),
        exp_avg_sq=(scale * scale * random.chisquare(8, numel) / 8 * (1 - 0.999**step)).astype(np.float32),
        gradient=rounded,
        hyper=kernels.Hyper(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, step=step),
    )


def exact_step(inputs: StepInputs) -> dict[str, Float64]:
    """AdamW's step on the same fp32 inputs, all of it in double precision."""
    h = inputs.hyper
    g = inputs.gradient.astype(np.float64) * h.gradient_factor
    exp_avg = h.beta1 * inputs.exp_avg.astype(np.float64) + (1 - h.beta1) * g
    exp_avg_sq = h.beta2 * inputs.exp_avg_sq.astype(np.float64) + (1 - h.beta2) * g * g
    denominator = np.sqrt(exp_avg_sq) / math.sqrt(1 - h.beta2**h.step) + h.eps
    update = h.lr / (1 - h.beta1**h.step) * exp_avg / denominator
    master = inputs.master.astype(np.float64) * (1 - h.lr * h.weight_decay) - update
    return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def units(inputs: StepInputs, exact: Mapping[str, Float64]) -> dict[str, Float64]:
    """The last place of the larger of the exact result and the old value, which is a term of it."""
    result = {}
    for part in PARTS:
        largest = np.maximum(np.abs(exact[part]), np.abs(getattr(inputs, part)))
        result[part] = np.spacing(largest.astype(np.float32)).astype(np.float64)
    return result


def errors(inputs: StepInputs, got: Mapping[str, Float32]) -> dict[str, ErrorFigures]:
    """Largest and mean error of each array that the step `got` left."""
    exact = exact_step(inputs)
    unit_of = units(inputs, exact)
    result = {}
    for part in PARTS:
        unit = unit_of[part]
        error = np.abs(got[part].astype(np.float64) - exact[part]) / unit
        result[part] = ErrorFigures(float(error.max()), float(error.mean()))
    return result


def our_step(inputs: StepInputs) -> dict[str, Float32]:
    """With the kernels of the current instruction set; all of them give the same bits."""
    master, exp_avg, exp_avg_sq = inputs.copies()
    shadow = np.empty_like(master)
    kernels.Span(master, exp_avg, exp_avg_sq, inputs.gradient, shadow).step(inputs.hyper)
    return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def torch_step(inputs: StepInputs) -> dict[str, Float32]:
    """With `torch.optim.AdamW(fused=True)`."""
    return _optimizer_step(
        inputs, lambda params, options: torch.optim.AdamW(params, fused=True, **options), as_tensor=True
    )


def deepspeed_step(inputs: StepInputs, deepspeed_class: Any) -> dict[str, Float32]:
    """With `DeepSpeedCPUAdam`."""
    return _optimizer_step(
        inputs, lambda params, options: deepspeed_class(params, adamw_mode=True, **options), as_tensor=False
    )


def _optimizer_step(
    inputs: StepInputs, make: Callable[[list[Tensor], dict[str, Any]], Any], *, as_tensor: bool
) -> dict[str, Float32]:
    h = inputs.hyper
    master, exp_avg, exp_avg_sq = inputs.copies()
    parameter = torch.nn.Parameter(torch.from_numpy(master))
    parameter.grad = torch.from_numpy(inputs.gradient.copy())
    options = {"lr": h.lr, "betas": (h.beta1, h.beta2), "eps": h.eps, "weight_decay": h.weight_decay}
    optimizer = make([parameter], options)
    optimizer.state[parameter] = {
        "step": torch.tensor(float(h.step - 1)) if as_tensor else h.step - 1,
        "exp_avg": torch.from_numpy(exp_avg),
        "exp_avg_sq": torch.from_numpy(exp_avg_sq),
    }
    optimizer.step()
    return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def accuracy_table(numel: int, deepspeed_class: Any | None = None) -> list[dict[str, Any]]:
    """One row per contestant and array."""
    inputs = training_like_inputs(numel, seed=0)
    results = {"superoffload": our_step(inputs), "torch.optim.AdamW(fused=True)": torch_step(inputs)}
    if deepspeed_class is not None:
        results["DeepSpeedCPUAdam"] = deepspeed_step(inputs, deepspeed_class)
    return [
        {"name": name, "array": part, "largest_ulp": figures.largest, "mean_ulp": figures.mean}
        for name, result in results.items()
        for part, figures in errors(inputs, result).items()
    ]
