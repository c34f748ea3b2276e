"""Measures the error of one step, ours and others', against double precision, in units in the last place.

The unit is that of the largest term of a sum: if terms cancel, the last place of the remainder says nothing about the
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.adam.peers import PEERS
from benchmarks.training.config import STATE_SETTINGS
from benchmarks.workload import BETAS, EPS, LR, WEIGHT_DECAY
from superoffload import AdamW
from tests.support import numpy_kernels

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

PARTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepInputs:
    """Holds state before the step, and a gradient that bf16 can hold; `hyper.step` is the number of the step."""

    master: Float32
    exp_avg: Float32
    exp_avg_sq: Float32
    gradient: Float32
    hyper: numpy_kernels.Hyper

    def copies(self) -> tuple[Float32, Float32, Float32]:
        return self.master.copy(), self.exp_avg.copy(), self.exp_avg_sq.copy()


def training_like_inputs(numel: int, seed: int, step: int = 100, lr: float = 1e-3) -> StepInputs:
    """Draws weights, moments and gradients with the spread of magnitudes that training has."""
    random = np.random.default_rng(seed)
    scale = np.exp(random.normal(-7.0, 2.0, numel))
    gradient = (scale * random.standard_normal(numel)).astype(np.float32)
    rounded = (gradient.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return StepInputs(
        master=(0.02 * random.standard_normal(numel)).astype(np.float32),
        exp_avg=(0.3 * scale * random.standard_normal(numel)).astype(np.float32),
        exp_avg_sq=(scale * scale * random.chisquare(8, numel) / 8 * (1 - 0.999**step)).astype(np.float32),
        gradient=rounded,
        hyper=numpy_kernels.Hyper(lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, step=step),
    )


def exact_step(inputs: StepInputs) -> dict[str, Float64]:
    """Computes AdamW's step on the same fp32 inputs in double precision."""
    h = inputs.hyper
    g = inputs.gradient.astype(np.float64) * h.gradient_factor
    exp_avg = h.beta1 * inputs.exp_avg.astype(np.float64) + (1 - h.beta1) * g
    exp_avg_sq = h.beta2 * inputs.exp_avg_sq.astype(np.float64) + (1 - h.beta2) * g * g
    denominator = np.sqrt(exp_avg_sq) / math.sqrt(1 - h.beta2**h.step) + h.eps
    update = h.lr / (1 - h.beta1**h.step) * exp_avg / denominator
    master = inputs.master.astype(np.float64) * (1 - h.lr * h.weight_decay) - update
    return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def errors(inputs: StepInputs, got: Mapping[str, Float32]) -> dict[str, Float64]:
    """Returns the errors of each array that the step `got` left, in units in the last place of the larger of the exact
    result and the old value, which is a term of it."""
    result = {}
    for part, exact in exact_step(inputs).items():
        largest = np.maximum(np.abs(exact), np.abs(getattr(inputs, part)))
        result[part] = np.abs(got[part] - exact) / np.spacing(largest.astype(np.float32)).astype(np.float64)
    return result


def our_step(inputs: StepInputs) -> dict[str, Float32]:
    """Steps with the kernels of the current instruction set; all of them give the same bits."""
    master, exp_avg, exp_avg_sq = inputs.copies()
    shadow = np.empty_like(master)
    numpy_kernels.Span(master, exp_avg, exp_avg_sq, inputs.gradient, shadow).step(inputs.hyper)
    return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def torch_step(inputs: StepInputs) -> dict[str, Float32]:
    """Steps with `torch.optim.AdamW(fused=True)`."""
    return _optimizer_step(inputs, torch.optim.AdamW, torch.tensor(float(inputs.hyper.step - 1)), fused=True)


def _optimizer_step(inputs: StepInputs, optimizer_class: Any, step: Any, **options: Any) -> dict[str, Float32]:
    """Steps with another library's class; ``step``: the count of steps before, in its own form."""
    h = inputs.hyper
    master, exp_avg, exp_avg_sq = inputs.copies()
    parameter = torch.nn.Parameter(torch.from_numpy(master))
    parameter.grad = torch.from_numpy(inputs.gradient.copy())
    hyper = {"lr": h.lr, "betas": (h.beta1, h.beta2), "eps": h.eps, "weight_decay": h.weight_decay}
    optimizer = optimizer_class([parameter], **hyper, **options)
    moments = {"exp_avg": torch.from_numpy(exp_avg), "exp_avg_sq": torch.from_numpy(exp_avg_sq)}
    optimizer.state[parameter] = {"step": step, **moments}
    optimizer.step()
    return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


# A step's number decides how its scalars are rounded, and with them the error of every element.
STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
LEARNING_RATES = (1e-3, 3e-4, 1e-5)

StepFunction = Callable[[StepInputs], Mapping[str, Float32]]


def accuracy_table(numel: int, deepspeed_class: Any | None = None) -> list[dict[str, Any]]:
    """Returns one row per contestant and array, over one draw of `numel` elements per step number and learning rate.

    The largest error of masters is a matter of luck: it is that of the one element whose exp_avg cancelled best. So
    there is the median of the draws' largest errors too.
    """
    contestants: dict[str, StepFunction] = {"superoffload": our_step, "torch.optim.AdamW(fused=True)": torch_step}
    if deepspeed_class is not None:
        contestants["DeepSpeedCPUAdam"] = lambda inputs: _optimizer_step(
            inputs, deepspeed_class, inputs.hyper.step - 1, adamw_mode=True
        )
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed, (step, lr) in enumerate((step, lr) for step in STEPS for lr in LEARNING_RATES):
        inputs = training_like_inputs(numel, seed, step, lr)
        for name, contestant in contestants.items():
            for part, error in errors(inputs, contestant(inputs)).items():
                found.setdefault((name, part), []).append((float(error.mean()), float(error.max())))
    rows = []
    for name in contestants:
        for part in PARTS:
            means, largest = zip(*found[name, part], strict=True)
            row = {"name": name, "array": part, "mean_ulp": float(np.mean(means))}
            rows.append({**row, "median_largest_ulp": float(np.median(largest)), "largest_ulp": max(largest)})
    return rows


def accuracy_text(table: list[dict[str, Any]]) -> str:
    """Returns one line per contestant and array, for a terminal."""
    head = f"error of a step, units in the last place, {len(STEPS) * len(LEARNING_RATES)} draws"
    lines = [f"{head:56} {'mean':>8} {'median largest':>14} {'largest':>9}"]
    for row in table:
        figures = f"{row['mean_ulp']:>8.3f} {row['median_largest_ulp']:>14.2f} {row['largest_ulp']:>9.2f}"
        lines.append(f"{row['name'] + ', ' + row['array']:56} {figures}")
    return "\n".join(lines)


# ---- of leaner state -------------------------------------------------------------------------------------------------

_STEPS, _NUMEL = 50, 1 << 18


def errors_of_state(settings: Sequence[str], peers: Sequence[str]) -> dict[str, float]:
    """Returns how far 50 steps on the same gradients move parameters from where fp64 state moves them, relative to the
    change (root of the mean square)."""
    options: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    exact = _exact_change()
    found = {}
    for name in settings:
        moments, masters = STATE_SETTINGS[name]
        param = nn.Parameter(_initial())
        with AdamW([param], **options, speculation="never", state_dtype=moments, master_dtype=masters) as optimizer:
            _train(param, optimizer)
            found[name] = _error(optimizer.state[param]["master"], exact)
    for name in peers:
        param = nn.Parameter(_initial().float())
        _train(param, PEERS[name].optimizer([param], **options))
        found[name] = _error(param.detach(), exact)
    return found


def _initial() -> Tensor:
    return 0.02 * torch.randn(_NUMEL, generator=torch.Generator().manual_seed(1)).bfloat16()


def _gradients() -> Iterator[Tensor]:
    """Yields bf16 gradients like those of the timed arrays: each element has a size and a direction, under noise."""
    random = torch.Generator().manual_seed(2)
    scale = 1e-3 * torch.exp(torch.randn(_NUMEL, generator=random))
    direction = 0.3 * torch.randn(_NUMEL, generator=random)
    for _ in range(_STEPS):
        yield (scale * (direction + torch.randn(_NUMEL, generator=random))).bfloat16()


def _exact_change() -> Float64:
    """Returns what AdamW in double precision adds to the parameters."""
    initial = _initial().double().numpy()
    state: dict[str, Any] = {"master": initial, "exp_avg": np.zeros(_NUMEL), "exp_avg_sq": np.zeros(_NUMEL)}
    for step, gradient in enumerate(_gradients(), 1):
        hyper = numpy_kernels.Hyper(LR, *BETAS, EPS, WEIGHT_DECAY, step=step)
        state = dict(exact_step(StepInputs(**state, gradient=gradient.float().numpy(), hyper=hyper)))
    change: Float64 = state["master"] - initial
    return change


def _train(param: nn.Parameter, optimizer: Any) -> None:
    for gradient in _gradients():
        param.grad = gradient.to(param.dtype)
        optimizer.step()


def _error(master: Tensor, exact: Float64) -> float:
    away = master.double().numpy() - _initial().double().numpy() - exact
    return float(np.sqrt(np.mean(away**2) / np.mean(exact**2)))
