"""Learning rate over a run: linear warm-up, then a cosine down to a tenth."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

FINAL_FRACTION = 0.1


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Factor on the base learning rate for the zero-based `step` of a run of `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return FINAL_FRACTION + (1.0 - FINAL_FRACTION) * 0.5 * (1.0 + math.cos(math.pi * progress))


def warmup_cosine(optimizer: Optimizer, warmup: int, steps: int) -> LambdaLR:
    """The schedule as an ordinary torch scheduler, since that is what users attach to the optimizer."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup, steps))
