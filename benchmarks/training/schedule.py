"""Sets learning rates: linear warm-up, then a cosine to a tenth."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

FINAL_FRACTION = 0.1  # of the learning rate, at the end of a run


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Returns the share of the base learning rate at zero-based `step`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_FRACTION + (1.0 - FINAL_FRACTION) * 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_cosine(optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, steps))
