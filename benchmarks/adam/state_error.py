"""Measures how far steps of leaner state, ours and others', move parameters from where fp64 state moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.adam.eight_bit_peers import EightBitPeer
from benchmarks.training.config import STATE_SETTINGS
from benchmarks.workload import BETAS, EPS, LR, WEIGHT_DECAY
from superoffload.adamw import AdamW

STEPS = 50
NUMEL = 1 << 18
_OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


def _initial() -> Tensor:
    return 0.02 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).bfloat16()


def _gradients() -> Iterator[Tensor]:
    """Yields bf16 gradients like those of the timed arrays: each element has a size and a direction, under noise."""
    random = torch.Generator().manual_seed(2)
    scale = 1e-3 * torch.exp(torch.randn(NUMEL, generator=random))
    direction = 0.3 * torch.randn(NUMEL, generator=random)
    for _ in range(STEPS):
        yield (scale * (direction + torch.randn(NUMEL, generator=random))).bfloat16()


def exact_change() -> NDArray[np.float64]:
    """Returns what AdamW in double precision adds to the parameters."""
    beta1, beta2 = BETAS
    initial = _initial().double().numpy()
    master, exp_avg, exp_avg_sq = initial.copy(), np.zeros(NUMEL), np.zeros(NUMEL)
    for step, gradient in enumerate(_gradients(), 1):
        g = gradient.double().numpy()
        exp_avg = beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
        denominator = np.sqrt(exp_avg_sq) / math.sqrt(1 - beta2**step) + EPS
        master = master * (1 - LR * WEIGHT_DECAY) - LR / (1 - beta1**step) * exp_avg / denominator
    change: NDArray[np.float64] = master - initial
    return change


def error_of_setting(setting: str, exact: NDArray[np.float64]) -> float:
    """Returns the error of one of our settings, relative to ``exact`` (root of the mean square)."""
    moments, masters = STATE_SETTINGS[setting]
    param = nn.Parameter(_initial())
    with AdamW([param], **_OPTIONS, speculation="never", state_dtype=moments, master_dtype=masters) as optimizer:
        return _error(
            lambda gradient: _step(param, gradient, optimizer), lambda: optimizer.state[param]["master"], exact
        )


def error_of_peer(peer: EightBitPeer, exact: NDArray[np.float64]) -> float:
    """Returns the error of another library's optimizer on fp32 parameters."""
    param = nn.Parameter(_initial().float())
    optimizer = peer.optimizer([param], **_OPTIONS)
    return _error(lambda gradient: _step(param, gradient.float(), optimizer), param.detach, exact)


def _step(param: nn.Parameter, gradient: Tensor, optimizer: Any) -> None:
    param.grad = gradient
    optimizer.step()


def _error(step: Callable[[Tensor], None], master: Callable[[], Tensor], exact: NDArray[np.float64]) -> float:
    for gradient in _gradients():
        step(gradient)
    away = master().double().numpy() - _initial().double().numpy() - exact
    return float(np.sqrt(np.mean(away**2) / np.mean(exact**2)))
